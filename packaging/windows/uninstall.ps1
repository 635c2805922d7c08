# Removes what install.ps1 installed; settings stay. NOT RUN ON WINDOWS: written and parsed on Linux only.
$ErrorActionPreference = 'Stop'
$place = Join-Path $env:LOCALAPPDATA 'npu-client'

# An environment, and nothing that somebody put there otherwise.
if (Test-Path (Join-Path $place 'pyvenv.cfg')) {
    Remove-Item -Recurse -Force $place
    Write-Output "removed: $place"
} else {
    Write-Output "nothing is installed in $place"
}
