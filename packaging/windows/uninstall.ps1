# Removes what install.ps1 installed. Settings stay, and models unless -RemoveModels is given. NOT RUN ON WINDOWS: written and
# parsed on Linux only.
[CmdletBinding()]
param(
    [switch] $RemoveModels
)
$ErrorActionPreference = 'Stop'

if (Get-ScheduledTask -TaskName 'npu-node' -ErrorAction SilentlyContinue) {
    Stop-ScheduledTask -TaskName 'npu-node'
    Unregister-ScheduledTask -TaskName 'npu-node' -Confirm:$false
    Write-Output 'removed: the task npu-node'
}
# npu-client is where the client alone was installed once.
foreach ($name in 'npu-node', 'npu-client') {
    $place = Join-Path $env:LOCALAPPDATA $name
    # An environment, and nothing that somebody put there otherwise.
    if (Test-Path (Join-Path $place 'pyvenv.cfg')) {
        Remove-Item -Recurse -Force $place
        Write-Output "removed: $place"
    }
}
$models = Join-Path $HOME '.cache\npu-node'
if ($RemoveModels -and (Test-Path $models)) {
    Remove-Item -Recurse -Force $models
    Write-Output "removed: $models"
}
