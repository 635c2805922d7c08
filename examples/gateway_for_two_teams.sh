#!/bin/sh
# A gateway for two teams: NODES=http://10.0.0.21:8081 examples/gateway_for_two_teams.sh [directory]
# Prints a key for each team, then serves on 127.0.0.1:8090. The cloud is off unless NPU_CLIENT_CLOUD__* name one.
set -eu
nodes=${NODES:-http://127.0.0.1:8081}
directory=${1:-.}
keys=$directory/gateway.db

if [ ! -e "$keys" ]; then
    # Chat users: 600 requests and 200,000 tokens a minute, and 20 a month for the cloud, if there is one.
    npu-gateway keys --keys "$keys" add chat --requests 600 --tokens 200000 --spend-cap 20
    # Batch work that must stay on the premises.
    npu-gateway keys --keys "$keys" add batch --requests 60 --no-cloud
fi

NPU_CLIENT_NODES=$nodes NPU_GATEWAY_KEYS=$keys exec npu-gateway serve --port "${PORT:-8090}"
