#!/usr/bin/env bats
# packaging/install.sh and uninstall.sh in the user's scope, with a Python that installs nothing (python3 beside this file).

setup() {
    scripts=$BATS_TEST_DIRNAME/../../../packaging
    export HOME=$BATS_TEST_TMPDIR/home PYTHON=$BATS_TEST_DIRNAME/python3 PIP_LOG=$BATS_TEST_TMPDIR/pip.log
    unset XDG_DATA_HOME XDG_CONFIG_HOME XDG_CACHE_HOME PIP_OPTIONS
    mkdir -p "$HOME" "$BATS_TEST_TMPDIR/bin"
    PATH=$BATS_TEST_TMPDIR/bin:/usr/bin:/bin
}

# A command that answers as told, before the real one.
stub() {
    printf '#!/bin/sh\n%s\n' "$2" > "$BATS_TEST_TMPDIR/bin/$1"
    chmod +x "$BATS_TEST_TMPDIR/bin/$1"
}

@test "it needs no root, puts commands on the path of the user, and names what to add to PATH" {
    stub id 'echo 1000'
    run "$scripts/install.sh"
    [ "$status" = 0 ]
    [[ $output == *"add $HOME/.local/bin to PATH"* ]]
    [ "$("$HOME/.local/bin/npu-node")" = "npu-node 0.1.0" ]
    [ -e "$HOME/.config/npu-node/node.toml" ]
    grep -q -- "--constraint .*constraints.txt .*\[node,convert\]" "$PIP_LOG"
}

@test "a second run keeps what the user changed" {
    "$scripts/install.sh"
    echo '# mine' >> "$HOME/.config/npu-node/node.toml"
    touch "$HOME/.local/share/npu-node/kept"
    run "$scripts/install.sh"
    [ "$status" = 0 ]
    grep -q '# mine' "$HOME/.config/npu-node/node.toml"
    [ -e "$HOME/.local/share/npu-node/kept" ]
    [ "$(wc -l < "$PIP_LOG")" = 2 ]
}

@test "a wheel is installed in place of the checkout" {
    touch "$BATS_TEST_TMPDIR/npu_node-1-py3-none-any.whl"
    "$scripts/install.sh" --wheel "$BATS_TEST_TMPDIR/npu_node-1-py3-none-any.whl"
    grep -q "$BATS_TEST_TMPDIR/npu_node-1-py3-none-any.whl\[node,convert\]" "$PIP_LOG"
}

@test "--service writes a unit of the user's systemd that uninstall removes" {
    stub systemctl 'exit 0'
    "$scripts/install.sh" --service
    grep -q "ExecStart=$HOME/.local/share/npu-node/bin/npu-node serve --config $HOME/.config/npu-node/node.toml" \
        "$HOME/.config/systemd/user/npu-node.service"
    "$scripts/uninstall.sh"
    [ ! -e "$HOME/.config/systemd/user/npu-node.service" ]
}

@test "uninstall leaves settings and models, says where they are, and can be run again" {
    "$scripts/install.sh"
    mkdir -p "$HOME/.cache/npu-node/models/mine"
    run "$scripts/uninstall.sh"
    [ "$status" = 0 ]
    [[ $output == *"left: $HOME/.config/npu-node"* ]]
    [[ $output == *"left: $HOME/.cache/npu-node"* ]]
    [ -d "$HOME/.cache/npu-node/models/mine" ]
    [ ! -e "$HOME/.local/share/npu-node" ]
    [ -z "$(ls -A "$HOME/.local/bin")" ]
    "$scripts/uninstall.sh"
}

@test "uninstall leaves the commands of another installation and directories that are none" {
    "$scripts/install.sh"
    ln -sfn /opt/other/bin/npu-node "$HOME/.local/bin/npu-node"
    rm "$HOME/.local/share/npu-node/pyvenv.cfg"
    "$scripts/uninstall.sh"
    [ "$(readlink "$HOME/.local/bin/npu-node")" = /opt/other/bin/npu-node ]
    [ -d "$HOME/.local/share/npu-node" ]
}

@test "the system scope needs root, to install and to uninstall" {
    stub id 'echo 1000'
    run "$scripts/install.sh" --scope system
    [ "$status" = 1 ]
    [[ $output == *"needs root: sudo"* ]]
    run "$scripts/uninstall.sh" --scope system
    [ "$status" = 1 ]
    [[ $output == *"needs root: sudo"* ]]
}

@test "what is missing is said before anything is written" {
    PYTHON_IS_OLD=1 run "$scripts/install.sh"
    [[ $status = 1 && $output == *"Python 3.11 or newer is needed: Python 3.9.2"* ]]
    NO_VENV=1 run "$scripts/install.sh"
    [[ $status = 1 && $output == *"apt install python3-venv"* ]]
    PYTHON=/none/python3 run "$scripts/install.sh"
    [[ $status = 1 && $output == *"/none/python3 is missing"* ]]
    stub df 'printf "Filesystem 1024-blocks Used Available Capacity Mounted\nx 1 1 102400 1%% /\n"'
    run "$scripts/install.sh"
    [[ $status = 1 && $output == *"it needs 700 MB, 100 MB are free"* ]]
    run "$scripts/install.sh" --scope planet
    [[ $status = 1 && $output == *"user or system, not planet"* ]]
    run "$scripts/install.sh" --nonsense
    [[ $status = 1 && $output == *"unknown option --nonsense"* ]]
    [ -z "$(ls -A "$HOME")" ]
}
