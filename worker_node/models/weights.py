"""Whether the weights of OpenVINO files are all there: OpenVINO's own error for a truncated file does not name it."""

from __future__ import annotations

import re
from pathlib import Path

from worker_node.core.errors import ConfigurationError
from worker_node.models.manifest import MANIFEST_FILE

_CONSTANT = re.compile(rb'offset="(\d+)" size="(\d+)"')


def check_weights(directory: Path) -> None:
    """Raise ConfigurationError, with the file's name, when a graph needs more bytes than its weights have.

    A directory with a manifest is not looked at: the manifest has the sizes, and they are checked with it.
    """
    if (directory / MANIFEST_FILE).is_file():
        return
    for graph in sorted(directory.glob("openvino*.xml")):
        ends = (int(offset) + int(size) for offset, size in _CONSTANT.findall(graph.read_bytes()))
        weights, needed = graph.with_suffix(".bin"), max(ends, default=0)
        found = weights.stat().st_size if weights.is_file() else 0
        if found < needed:
            raise ConfigurationError(
                f"{weights}: {found} bytes, and {graph.name} needs {needed}; the file is truncated or missing: copy it "
                "again"
            )
