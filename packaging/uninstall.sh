#!/bin/sh
# Removes what packaging/install.sh installed: packaging/uninstall.sh [--scope user|system]
# Settings, keys and models stay; it says where they are.
set -eu
scope=user

while [ $# -gt 0 ]; do
    case $1 in
    --scope) scope=${2:?--scope needs user or system}; shift 2 ;;
    -h | --help) sed -n '2,3s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "uninstall.sh: unknown option $1; see --help" >&2; exit 1 ;;
    esac
done
case $scope in
user)
    home=${XDG_DATA_HOME:-$HOME/.local/share}/npu-node bin=$HOME/.local/bin
    unit=${XDG_CONFIG_HOME:-$HOME/.config}/systemd/user/npu-node.service
    left="${XDG_CONFIG_HOME:-$HOME/.config}/npu-node ${XDG_CACHE_HOME:-$HOME/.cache}/npu-node"
    [ ! -e "$unit" ] || systemctl --user disable --now npu-node.service 2> /dev/null || true
    ;;
system)
    [ "$(id -u)" = 0 ] || { echo "uninstall.sh: the system scope needs root: sudo $0 --scope system" >&2; exit 1; }
    home=/opt/npu-node/current bin=/usr/local/bin unit=/etc/systemd/system/npu-node.service
    rm -f /etc/udev/rules.d/70-npu-node.rules
    left="/etc/npu-node /var/lib/npu-node"
    [ ! -d /run/systemd/system ] || systemctl disable --now npu-node.service 2> /dev/null || true
    ;;
*)
    echo "uninstall.sh: --scope is user or system, not $scope" >&2
    exit 1
    ;;
esac

rm -f "$unit"
for command in npu-node npu-client npu-gateway; do
    # Only links that lead to what is removed: another installation keeps its commands.
    [ "$(readlink "$bin/$command" 2> /dev/null)" != "$home/bin/$command" ] || rm -f "$bin/$command"
done
# An environment, and nothing that somebody put there otherwise.
[ ! -e "$home/pyvenv.cfg" ] || rm -rf "$home"
for place in $left; do [ ! -e "$place" ] || echo "left: $place"; done
