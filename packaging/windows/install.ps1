# Installs the node and the client for this user; the node starts at each logon, on 127.0.0.1 alone, without other rights
# than the user's. NOT RUN ON WINDOWS: written and parsed on Linux only.
#   .\install.ps1 [-Wheel FILE] [-Python EXE] [-ClientOnly]
# It can be run again, for another version, too; settings and models are never touched.
[CmdletBinding()]
param(
    [string] $Wheel = '',
    [string] $Python = 'py',
    [switch] $ClientOnly
)
$ErrorActionPreference = 'Stop'
$root = Split-Path -Parent (Split-Path -Parent $PSScriptRoot)
$place = Join-Path $env:LOCALAPPDATA 'npu-node'
$scripts = Join-Path $place 'Scripts'
$task = 'npu-node'

function Stop-WithMessage([string] $Message) {
    Write-Error "install.ps1: $Message" -ErrorAction Continue
    exit 1
}

if (-not (Get-Command $Python -ErrorAction SilentlyContinue)) {
    Stop-WithMessage "$Python is missing: winget install Python.Python.3.12"
}
& $Python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] or sys.maxsize < 2**32)'
if ($LASTEXITCODE -ne 0) {
    Stop-WithMessage 'a 64-bit Python 3.11 or newer is needed'
}
# A running node holds its files open.
if (Get-ScheduledTask -TaskName $task -ErrorAction SilentlyContinue) {
    Stop-ScheduledTask -TaskName $task
}
if (-not (Test-Path (Join-Path $scripts 'python.exe'))) {
    & $Python -m venv $place
    if ($LASTEXITCODE -ne 0) {
        Stop-WithMessage "no environment could be made in $place"
    }
}
$source = if ($Wheel) { (Resolve-Path $Wheel).Path } else { $root }
$extras = if ($ClientOnly) { '' } else { '[node,convert]' }
& (Join-Path $scripts 'python.exe') -m pip install --quiet --disable-pip-version-check --only-binary ':all:' `
    --no-binary npu-node --constraint (Join-Path $root 'constraints.txt') "$source$extras"
if ($LASTEXITCODE -ne 0) {
    Stop-WithMessage "pip could not install $source$extras"
}
$path = [Environment]::GetEnvironmentVariable('Path', 'User')
if (($path -split ';') -notcontains $scripts) {
    Write-Output "add $scripts to Path, or call the programs there"
}
& (Join-Path $scripts 'npu-client.exe') --version
if ($ClientOnly) {
    exit 0
}
& (Join-Path $scripts 'npu-node.exe') pull --embedded
if ($LASTEXITCODE -ne 0) {
    Stop-WithMessage 'the embedded models could not be pulled; run: npu-node pull --embedded'
}
# Keys and other settings are read from node.toml in .config\npu-node of the user: nothing of them is in the task.
$user = "$env:USERDOMAIN\$env:USERNAME"
$action = New-ScheduledTaskAction -Execute (Join-Path $scripts 'npu-node.exe') -Argument 'serve' -WorkingDirectory $place
$trigger = New-ScheduledTaskTrigger -AtLogOn -User $user
$principal = New-ScheduledTaskPrincipal -UserId $user -LogonType Interactive -RunLevel Limited
$settings = New-ScheduledTaskSettingsSet -RestartCount 3 -RestartInterval (New-TimeSpan -Minutes 1) `
    -ExecutionTimeLimit ([TimeSpan]::Zero) -AllowStartIfOnBatteries -DontStopIfGoingOnBatteries
Register-ScheduledTask -TaskName $task -Action $action -Trigger $trigger -Principal $principal -Settings $settings `
    -Force | Out-Null
Start-ScheduledTask -TaskName $task
Write-Output 'the node starts: http://127.0.0.1:8081/dashboard; next: npu-node doctor'
