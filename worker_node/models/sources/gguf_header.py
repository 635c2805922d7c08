"""What a GGUF file says of its model in its first bytes, so that it can be rejected before it is downloaded."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from worker_node.core.errors import SourceRejected

# Enough for the metadata that precedes the tokenizer in files of every common writer.
HEADER_BYTES = 64 << 10
# Those that GenAI's reader builds a graph for (openvino-genai 2026.4).
ARCHITECTURES = ("llama", "qwen2", "qwen3")

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_TEXT = 1 << 16


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The metadata in front of the tokenizer, by name."""

    fields: dict[str, Any]

    @property
    def architecture(self) -> str:
        """`general.architecture`, or an empty string."""
        return str(self.fields.get("general.architecture", ""))

    def number(self, name: str) -> int | None:
        """A whole number about the architecture, such as `block_count`; None where the file does not say."""
        value = self.fields.get(f"{self.architecture}.{name}")
        return int(value) if isinstance(value, int) else None


def parse_header(head: bytes, name: str) -> GgufHeader:
    """Read the first bytes of a file; what is cut off is left out. Raises SourceRejected when it is no GGUF file."""
    if len(head) < 24 or head[:4] != _MAGIC:
        raise SourceRejected(f"{name} is not a GGUF file: it does not begin with GGUF")
    version, _, count = struct.unpack_from("<IQQ", head, 4)
    if version not in _VERSIONS:
        raise SourceRejected(f"{name} has GGUF version {version}; known are {_VERSIONS[0]} and {_VERSIONS[1]}")
    reader = _Reader(head, 24)
    fields: dict[str, Any] = {}
    try:
        for _ in range(min(count, 4096)):
            key = reader.text()
            if key.startswith("tokenizer."):
                break
            fields[key] = reader.value(reader.scalar("I"))
    except (struct.error, _CutOff):
        pass  # the rest is beyond what was read
    return GgufHeader(fields)


def require_known_architecture(architecture: str, name: str) -> None:
    """Raises SourceRejected unless models of this architecture can be converted."""
    if architecture not in ARCHITECTURES:
        raise SourceRejected(
            f"{name} is a GGUF file of architecture {architecture or 'unknown'!r}; those that can be converted are "
            f"{', '.join(ARCHITECTURES)}. Look for a repository of the same model that ends in -ov "
            "(npu-node list --all shows some)"
        )


class _CutOff(Exception):
    """The value lies beyond the bytes that were read, or is none that a header holds."""


class _Reader:
    def __init__(self, data: bytes, offset: int) -> None:
        self._data = data
        self._offset = offset

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._data, self._offset)
        self._offset += struct.calcsize(f"<{code}")
        return value

    def text(self) -> str:
        length = self.scalar("Q")
        end = self._offset + length
        if length > _MAX_TEXT or end > len(self._data):
            raise _CutOff
        value = self._data[self._offset : end].decode(errors="replace")
        self._offset = end
        return value

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            item, count = self.scalar("I"), self.scalar("Q")
            if item == _ARRAY or count > len(self._data):
                raise _CutOff
            return [self.value(item) for _ in range(count)]
        if kind not in _SCALARS:
            raise _CutOff
        return self.scalar(_SCALARS[kind])
