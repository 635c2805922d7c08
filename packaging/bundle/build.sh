#!/bin/sh
# Builds dist/npu-node-bundle/, a directory with Python and everything that a node needs: packaging/bundle/build.sh
# It runs on machines with this machine's C library or a newer one, without Python. PYTHON: an environment with the node
# and PyInstaller (make bundle makes one).
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-$root/.venv-bundle/bin/python}
dist=${DIST:-$root/dist}
# What PyInstaller would miss after minutes is said now.
command -v objdump > /dev/null || { echo "build.sh: objdump is missing: apt install binutils" >&2; exit 1; }
library=$("$python" -c 'import sys; print("libpython%d.%d" % sys.version_info[:2] * (sys.base_prefix == "/usr"))')
[ -z "$library" ] || /sbin/ldconfig -p | grep -q "$library\.so" || { echo "build.sh: $library is missing: apt install $library" >&2; exit 1; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

set -- --noconfirm --clean --log-level ERROR --onedir --name npu-node-bundle \
    --distpath "$dist" --workpath "$work" --specpath "$work" --contents-directory lib
# Modules that are only named in strings, and files that are no Python.
for package in worker_node backend_client openvino openvino_genai openvino_tokenizers tokenizers pip; do
    set -- "$@" --collect-all "$package"
done
for package in gguf safetensors openai; do set -- "$@" --collect-submodules "$package" --collect-data "$package"; done
for package in npu-node openvino openvino-genai openvino-tokenizers gguf safetensors numpy; do
    set -- "$@" --copy-metadata "$package"
done
"$python" -m PyInstaller "$@" "$root/packaging/bundle/entry.py"
mv "$dist/npu-node-bundle/npu-node-bundle" "$dist/npu-node-bundle/npu-node"
du -sh "$dist/npu-node-bundle"
