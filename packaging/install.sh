#!/bin/sh
# Installs a node from this checkout, or from a wheel: packaging/install.sh [--scope user|system] [--wheel FILE] [--service]
#   user    (default) into ~/.local/share/npu-node, commands in ~/.local/bin; needs no root
#   system  into /opt/npu-node/current, with the user npu-node and its unit; needs root
#   --service  user scope: also a unit of the user's systemd
# It can be run again: it then installs what is newer. What the user made (settings, keys, models) is never touched.
# PIP_OPTIONS: options for pip, such as --no-index --find-links=/wheels.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
scope=user wheel='' service=no
python=${PYTHON:-python3}

fail() { echo "install.sh: $1" >&2; exit 1; }

while [ $# -gt 0 ]; do
    case $1 in
    --scope) scope=${2:?--scope needs user or system}; shift 2 ;;
    --wheel) wheel=$(realpath "${2:?--wheel needs a file}"); shift 2 ;;
    --service) service=yes; shift ;;
    -h | --help) sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) fail "unknown option $1; see --help" ;;
    esac
done
case $scope in
user) home=${XDG_DATA_HOME:-$HOME/.local/share}/npu-node bin=$HOME/.local/bin settings=${XDG_CONFIG_HOME:-$HOME/.config}/npu-node ;;
system) home=/opt/npu-node/current bin=/usr/local/bin settings=/etc/npu-node ;;
*) fail "--scope is user or system, not $scope" ;;
esac

# What would fail later is said now.
[ "$scope" = user ] || [ "$(id -u)" = 0 ] || fail "the system scope needs root: sudo $0 --scope system"
command -v "$python" > /dev/null || fail "$python is missing: apt install python3 python3-venv"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "Python 3.11 or newer is needed: $("$python" --version)"
"$python" -c 'import ensurepip' 2> /dev/null || fail "Python's venv module is missing: apt install python3-venv"
near=$home
while [ ! -d "$near" ]; do near=$(dirname "$near"); done
free=$(df -Pk "$near" | awk 'NR == 2 { print int($4 / 1024) }')
[ -x "$home/bin/npu-node" ] || [ "$free" -ge 700 ] || fail "not enough disk space in $near: it needs 700 MB, $free MB are free"

mkdir -p "$home" "$bin"
[ -x "$home/bin/python" ] || "$python" -m venv "$home"
# shellcheck disable=SC2086  # several options
"$home/bin/python" -m pip install --quiet --disable-pip-version-check ${PIP_OPTIONS:-} \
    --constraint "$root/constraints.txt" "${wheel:-$root}[node,convert]"
for command in npu-node npu-client npu-gateway; do ln -sfn "$home/bin/$command" "$bin/$command"; done
[ -e "$settings/node.toml" ] || { mkdir -p "$settings" && cp "$root/config/node.toml" "$settings/node.toml"; }

if [ "$scope" = system ]; then
    getent group render > /dev/null || groupadd --system render
    getent passwd npu-node > /dev/null ||
        useradd --system --user-group --home-dir /var/lib/npu-node --shell /usr/sbin/nologin npu-node
    [ -e "$settings/api_keys" ] || (umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \n' > "$settings/api_keys")
    cp "$root/config/systemd/npu-node.service" /etc/systemd/system/npu-node.service
    mkdir -p /etc/udev/rules.d
    cp "$root/config/udev/70-npu-node.rules" /etc/udev/rules.d/
    ! udevadm control --reload 2> /dev/null || udevadm trigger --subsystem-match=intel_pmt --subsystem-match=powercap
    [ ! -d /run/systemd/system ] || systemctl daemon-reload
elif [ "$service" = yes ]; then
    units=${XDG_CONFIG_HOME:-$HOME/.config}/systemd/user
    mkdir -p "$units"
    cat > "$units/npu-node.service" << EOF
[Unit]
Description=Inference node for Intel NPUs

[Service]
Type=notify
ExecStart=$home/bin/npu-node serve --config $settings/node.toml
Restart=on-failure
TimeoutStopSec=45

[Install]
WantedBy=default.target
EOF
    ! systemctl --user daemon-reload 2> /dev/null || true
fi

"$home/bin/npu-node" --version
case ":$PATH:" in *":$bin:"*) ;; *) echo "add $bin to PATH" ;; esac
echo "next: npu-node pull --embedded && npu-node serve    (settings: $settings/node.toml)"
