"""What a binary of Intel's NPU compiler says of itself: the time it predicts for one run, and its memory.

A binary of OpenVINO holds one ELF file for each compiled part. Its section `perf.metrics` has a table of ticks, by the
NPU's frequency; `buffer.DDR` and its like are memory on the device.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

_MAGIC = b"\x7fELF"
# Ticks of a timer of 38.4 MHz on NPU 3720, of 19.2 MHz later (npu_compiler, vpux/utils/profiling/parser/freq.hpp).
_TICK_MHZ = {"3720": 38.4}
_DEFAULT_TICK_MHZ = 19.2
# The table has five frequencies with five bandwidths each, and the compiler does not model the bandwidths.
_TABLE = struct.Struct("<25Q")
_DEVICE_MEMORY = ("buffer.DDR", "data.BuffersIO")


class Part(NamedTuple):
    """One compiled part: milliseconds a run at the lowest and the highest frequency, and bytes.

    `size` is what follows it up to the next part: its code, and the weights of all layers that it serves.
    """

    slow_ms: float
    fast_ms: float
    device_bytes: int
    size: int


def parts_of(data: bytes) -> list[Part]:
    """The parts in the order of the binary."""
    found = []
    for at, sections in _files(data):
        compatibility = sections.get("compatibility_string", b"").decode(errors="replace")
        platform = compatibility.partition("npu=")[2].partition(";")[0]
        ticks = 1e3 * _TICK_MHZ.get(platform, _DEFAULT_TICK_MHZ)
        table = _TABLE.unpack_from(sections["perf.metrics"], 16)
        memory = sum(len(content) for name, content in sections.items() if name.startswith(_DEVICE_MEMORY))
        found.append((at, table[0] / ticks, table[20] / ticks, memory))
    ends = [at for at, *_ in found[1:]] + [len(data)]
    return [Part(slow, fast, memory, end - at) for (at, slow, fast, memory), end in zip(found, ends, strict=True)]


def _files(data: bytes) -> Iterator[tuple[int, dict[str, bytes]]]:
    at = data.find(_MAGIC)
    while at >= 0:
        try:
            sections = dict(_sections(data, at))
        except (struct.error, ValueError, UnicodeDecodeError):
            sections = {}  # four bytes of weights that look like the beginning of a file
        if "perf.metrics" in sections:
            yield at, sections
        at = data.find(_MAGIC, at + 1)


def _sections(data: bytes, base: int) -> Iterator[tuple[str, bytes]]:
    (table,) = struct.unpack_from("<Q", data, base + 0x28)
    size, count, names = struct.unpack_from("<HHH", data, base + 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, base + table + number * size) for number in range(count)]
    if names >= count:
        raise ValueError("no section has the names")
    texts = base + headers[names][4]
    for index, (name, _, _, _, offset, length, *_) in enumerate(headers):
        start = texts + name
        text = data[start : data.index(b"\0", start)].decode().lstrip(".")
        # Memory that a run needs has a length and no content; several sections of it have one name.
        if text.startswith(_DEVICE_MEMORY):
            yield f"{text} {index}", bytes(length)
        else:
            yield text, data[base + offset : base + offset + length]
