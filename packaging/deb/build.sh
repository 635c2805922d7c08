#!/bin/sh
# Builds npu-node_VERSION_amd64.deb into dist/ for the Debian that this runs on: packaging/deb/build.sh
# The package brings an environment of its own below /usr/lib/npu-node, for this distribution's python3.
# PIP_OPTIONS: options for pip, such as --no-index --find-links=/wheels.  DIST: where the package goes.
# COMPRESSION: options for dpkg-deb; MAINTAINER: "Name <address>".
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
dist=${DIST:-$root/dist}
python=${PYTHON:-/usr/bin/python3}
home=/usr/lib/npu-node
maintainer=${MAINTAINER:-npu-node maintainers <npu-node@example.net>}

for tool in dpkg-deb dpkg "$python"; do
    command -v "$tool" >/dev/null || { echo "$tool is missing: apt install dpkg python3-venv" >&2; exit 1; }
done
"$python" -c 'import ensurepip' || { echo "python3-venv is missing: apt install python3-venv" >&2; exit 1; }
minor=$("$python" -c 'import sys; print(sys.version_info.minor)')
version=$("$python" -c 'import sys, tomllib; print(tomllib.load(open(sys.argv[1], "rb"))["project"]["version"])' "$root/pyproject.toml")
# shellcheck source=/dev/null
release=$(. /etc/os-release && echo "deb${VERSION_ID:-0}")
arch=$(dpkg --print-architecture)
umask 022

stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
package=$stage/package
mkdir -p "$package/DEBIAN" "$package$home" "$package/usr/bin" "$package/etc/npu-node" \
    "$package/lib/systemd/system" "$package/lib/udev/rules.d" "$package/usr/share/doc/npu-node" "$package/usr/share/lintian/overrides"

# The environment is made where it is not going to be; what holds its path is corrected after.
"$python" -m venv "$package$home"
# shellcheck disable=SC2086  # several options
"$package$home/bin/python" -m pip install --quiet --quiet --disable-pip-version-check --no-compile ${PIP_OPTIONS:-} \
    --constraint "$root/constraints.txt" "${root}[node,convert]"
find "$package$home" -name __pycache__ -prune -exec rm -rf {} +
# Wheels bring their makers' tests and headers; the node needs neither.
rm -rf "$package$home/include" "$package$home/share/doc"
find "$package$home"/lib/python3.*/site-packages/numpy -depth -type d \( -name tests -o -name test \) -exec rm -rf {} +
grep -rlI "$package" "$package$home/bin" "$package$home/pyvenv.cfg" | xargs -r sed -i "s#$package##g"
find "$package$home"/lib -name '*.py' -perm /111 -exec chmod a-x {} +
ln -sfn ../../../bin/python3 "$package$home/bin/python3"
ln -sfn python3 "$package$home/bin/python"
chmod -R u+w,go-w,a+rX "$package$home"
ln -s ../lib/npu-node/bin/npu-client "$package/usr/bin/npu-client"
install -m 755 "$root/packaging/deb/npu-node" "$package/usr/bin/npu-node"

sed -e "s#/opt/npu-node/current/bin/npu-node#$home/bin/npu-node#" -e '/^#/d' \
    "$root/config/systemd/npu-node.service" > "$package/lib/systemd/system/npu-node.service"
sed 's#^\# model_store = .*#\# model_store: /var/lib/npu-node/models (set by the unit)#' \
    "$root/config/node.toml" > "$package/etc/npu-node/node.toml"
install -m 644 "$root/config/udev/70-npu-node.rules" "$package/lib/udev/rules.d"
echo /etc/npu-node/node.toml > "$package/DEBIAN/conffiles"
for script in postinst prerm postrm; do install -m 755 "$root/packaging/deb/$script" "$package/DEBIAN/$script"; done
install -m 644 "$root/packaging/deb/lintian-overrides" "$package/usr/share/lintian/overrides/npu-node"
install -m 644 "$root"/README.md "$root"/CHANGELOG.md "$root"/docs/*.md "$package/usr/share/doc/npu-node"
install -m 644 "$root/packaging/deb/copyright" "$package/usr/share/doc/npu-node/copyright"
printf 'npu-node (%s-1~%s) unstable; urgency=medium\n\n  * Built from a checkout; see CHANGELOG.md.\n\n -- %s  %s\n' \
    "$version" "$release" "$maintainer" "$(date -R --utc --date="@${SOURCE_DATE_EPOCH:-$(date +%s)}")" | gzip -9n > "$package/usr/share/doc/npu-node/changelog.Debian.gz"
cat > "$package/DEBIAN/control" <<EOF
Package: npu-node
Version: $version-1~$release
Architecture: $arch
Maintainer: $maintainer
Installed-Size: $(du -sk "$package" | cut -f1)
Depends: python3 (>= 3.$minor), python3 (<< 3.$((minor + 1))), adduser, libc6, libstdc++6, zlib1g
Recommends: libze1
Section: net
Priority: optional
Description: inference node for Intel NPUs
 Serves embeddings and text generation through OpenVINO on an NPU, GPU or CPU,
 over a native API, OpenAI's and Ollama's. Also brings npu-client, which calls
 such nodes.
EOF
mkdir -p "$dist"
# shellcheck disable=SC2086  # several options
dpkg-deb --root-owner-group ${COMPRESSION:--Zxz -z2} --build "$package" "$dist/npu-node_$version-1~${release}_$arch.deb"
