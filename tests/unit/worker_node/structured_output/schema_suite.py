"""The official test suite of JSON Schema, draft 2020-12.

    python -m tests.unit.worker_node.structured_output.schema_suite

fetches it into the environment, once, and `make test` does so first.
"""

import hashlib
import json
import sys
import tarfile
from pathlib import Path

from tests.support.foreign import kept, pip

# The source distribution of the validator `jsonschema` carries the suite; a wheel does not.
PACKAGE = "jsonschema==4.26.0"
SHA256 = "0c26707e2efad8aa1bfc5b7ce170f3fccc2e4918ff85989ba9ffa9facb2be326"


def groups(part="."):
    """(name, schema, tests) of each group of the suite; `part` "optional/format" has those of the formats."""
    directory = kept(f"json-schema-{SHA256[:12]}", _fetch) / "suite" / part
    return [
        (f"{path.stem}: {group['description']}", group["schema"], group["tests"])
        for path in sorted(directory.glob("*.json"))
        for group in json.loads(path.read_text("utf-8"))
    ]


def _fetch(directory):
    pip(sys.executable, "download", "--no-deps", "--no-binary=jsonschema", f"--dest={directory}", PACKAGE)
    archive: Path = next(directory.glob("*.tar.gz"))
    if hashlib.sha256(archive.read_bytes()).hexdigest() != SHA256:
        raise RuntimeError(f"{PACKAGE}: the archive is not the one that is pinned here")
    with tarfile.open(archive) as opened:
        opened.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4 and newer have it
        opened.extractall(directory)  # noqa: S202  (its hash was compared)
    next(directory.glob("*/json/tests/draft2020-12")).rename(directory / "suite")


if __name__ == "__main__":
    groups()
