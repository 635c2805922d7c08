# Installs npu-client, the client of NPU nodes, for this user. NOT RUN ON WINDOWS: written and parsed on Linux only.
#   .\install.ps1 [-Wheel FILE] [-Python EXE]
# Nodes do not run on Windows: see "Windows" in docs/install.md. It can be run again; settings are never touched.
[CmdletBinding()]
param(
    [string] $Wheel = '',
    [string] $Python = 'py'
)
$ErrorActionPreference = 'Stop'
$root = Split-Path -Parent (Split-Path -Parent $PSScriptRoot)
$place = Join-Path $env:LOCALAPPDATA 'npu-client'
$program = Join-Path $place 'Scripts\npu-client.exe'

function Stop-WithMessage([string] $Message) {
    Write-Error "install.ps1: $Message" -ErrorAction Continue
    exit 1
}

if (-not (Get-Command $Python -ErrorAction SilentlyContinue)) {
    Stop-WithMessage "$Python is missing: winget install Python.Python.3.12"
}
& $Python -c 'import sys; sys.exit(sys.version_info < (3, 11))'
if ($LASTEXITCODE -ne 0) {
    Stop-WithMessage 'Python 3.11 or newer is needed'
}
if (-not (Test-Path (Join-Path $place 'Scripts\python.exe'))) {
    & $Python -m venv $place
    if ($LASTEXITCODE -ne 0) {
        Stop-WithMessage "no environment could be made in $place"
    }
}
$source = if ($Wheel) { (Resolve-Path $Wheel).Path } else { $root }
& (Join-Path $place 'Scripts\python.exe') -m pip install --quiet --disable-pip-version-check `
    --constraint (Join-Path $root 'constraints.txt') $source
if ($LASTEXITCODE -ne 0) {
    Stop-WithMessage "pip could not install $source"
}
$scripts = Join-Path $place 'Scripts'
$path = [Environment]::GetEnvironmentVariable('Path', 'User')
if (($path -split ';') -notcontains $scripts) {
    Write-Output "add $scripts to Path, or call $program"
}
& $program --version
