#!/bin/sh
# Builds what a release consists of into dist/ (docs/releasing.md): packaging/dist.sh
#   wheel and sdist, the pins, the Debian package for the Debian that this runs on, the Containerfile of the image,
#   the documentation as a site, the SBOM, SHA256SUMS
# PYTHON: an environment with hatchling, twine, cyclonedx-bom and mkdocs-material (make dist makes one).  DIST: where the files go.
# DEB=no: without the Debian package, which installs a node's environment (110 MB to download, some minutes).
# BASE: the image's base, pinned by digest: BASE=debian:13-slim@sha256:…
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$root/.venv-dist/bin/python}
mkdir -p "${DIST:-$root/dist}"
dist=$(cd "${DIST:-$root/dist}" && pwd)
cd "$root"

version=$("$python" -c 'import tomllib; print(tomllib.load(open("pyproject.toml", "rb"))["project"]["version"])')
# All times in the files are that of the commit, so that a second run builds the same ones.
revision=unknown
if git rev-parse HEAD > /dev/null 2>&1; then
    revision=$(git rev-parse HEAD)
    SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
    [ -z "$(git status --porcelain)" ] || echo "dist.sh: not for a release: there are changes that are not committed" >&2
fi
export SOURCE_DATE_EPOCH="${SOURCE_DATE_EPOCH:-$(date +%s)}"
created=$(date --utc --date="@$SOURCE_DATE_EPOCH" +%Y-%m-%dT%H:%M:%SZ)

# Of this version only: the packages of other Debians are built on those and copied here.
rm -f "$dist/npu_node-$version"[-.]* "$dist/npu-node-$version".*
"$python" -m hatchling build -d "$dist"
"$python" -m twine --no-color check --strict "$dist/npu_node-$version"[-.]*

if [ "${DEB:-yes}" = no ]; then
    echo "left out: the Debian package (DEB=no)"
elif command -v dpkg-deb > /dev/null && /usr/bin/python3 -c 'import ensurepip' 2> /dev/null; then
    DIST=$dist PYTHON=/usr/bin/python3 packaging/deb/build.sh
else
    echo "left out: the Debian package; on Debian: apt install dpkg python3-venv"
fi

sed -e "s|^ARG VERSION=.*|ARG VERSION=\"$version\"|" -e "s|^ARG REVISION=.*|ARG REVISION=\"$revision\"|" \
    -e "s|^ARG CREATED=.*|ARG CREATED=\"$created\"|" ${BASE:+-e "s|^ARG BASE=.*|ARG BASE=$BASE|"} \
    config/container/Containerfile > "$dist/npu-node-$version.Containerfile"

cp constraints.txt "$dist/npu-node-$version.constraints.txt"

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
NO_MKDOCS_2_WARNING=1 "$python" -m mkdocs build --quiet --strict --site-dir "$site/npu-node-$version"
tar --create --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner --mode=go=u-w \
    --directory "$site" "npu-node-$version" | gzip -9n > "$dist/npu-node-$version.site.tar.gz"

# What a node installs, in the pinned versions, without the addresses that the tool presumes the packages come from.
awk -F== '/^#/ { next } { name = tolower($1); gsub(/[-_.]+/, "-", name) } NR == FNR { node[name]; next } name in node' \
    packaging/node-packages.txt constraints.txt |
    "$python" -W ignore -m cyclonedx_py requirements --pyproject pyproject.toml --output-reproducible - |
    "$python" -c 'import json, sys
sbom = json.load(sys.stdin)
for component in sbom["components"]: del component["externalReferences"], component["description"]
json.dump(sbom, sys.stdout, indent=2)' > "$dist/npu-node-$version.cdx.json"

cd "$dist"
find . -maxdepth 1 -type f \( -name "npu_node-${version}[-.]*" -o -name "npu-node_$version-*.deb" -o -name "npu-node-$version.*" \) \
    -printf '%P\n' | LC_ALL=C sort | xargs sha256sum | tee SHA256SUMS
