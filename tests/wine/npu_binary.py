"""What a binary of Intel's NPU compiler says of itself: the time it predicts for one run, and its memory.

A decoder is many parts, of which one serves all layers but the first and the last (`Decoder`).

A binary of OpenVINO holds one ELF file for each compiled part. Its section `perf.metrics` has a table of ticks, by the
NPU's frequency; `buffer.DDR` and its like are memory on the device.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_MAGIC = b"\x7fELF"
# Ticks of a timer of 38.4 MHz on NPU 3720, of 19.2 MHz later (npu_compiler, vpux/utils/profiling/parser/freq.hpp).
_TICK_MHZ = {"3720": 38.4}
_DEFAULT_TICK_MHZ = 19.2
# The table has five frequencies with five bandwidths each, and the compiler does not model the bandwidths.
_TABLE = struct.Struct("<25Q")
_DEVICE_MEMORY = ("buffer.DDR", "data.BuffersIO")
# The name of the network follows that of the NPU. Binaries for 3720 have none: NPUW's own name of the graph stands
# before its parts, of which the second serves the layers between the first and the last.
_NAME_AT = 288
_GRAPH = re.compile(rb"(Model\d+_(?:kv\d+|prefill|lm_head))[^\w]")


class Part(NamedTuple):
    """One compiled part: milliseconds a run at the lowest and the highest frequency, and bytes."""

    name: str
    slow_ms: float
    fast_ms: float
    device_bytes: int


def parts_of(data: bytes) -> list[Part]:
    """The parts in the order of the binary."""
    found: list[Part] = []
    end = 0
    for magic in re.finditer(_MAGIC, data):
        at = magic.start()
        try:
            sections = list(_sections(data, at))
        except (struct.error, ValueError, UnicodeDecodeError):
            continue  # four bytes of weights that look like the beginning of a file
        contents = {name: data[at + offset : at + offset + size] for name, offset, size in sections}
        if "perf.metrics" not in contents:
            continue
        compatibility = contents.get("compatibility_string", b"").decode(errors="replace")
        platform = compatibility.partition("npu=")[2].partition(";")[0]
        ticks = 1e3 * _TICK_MHZ.get(platform, _DEFAULT_TICK_MHZ)
        table = _TABLE.unpack_from(contents["perf.metrics"], 16)
        name = contents.get("MetadataSection", b"")[_NAME_AT:].partition(b"\0")[0].decode(errors="replace")
        if not name:
            graphs = _GRAPH.findall(data, end, at)
            earlier = found[-1].name if found else ""
            name = f"{graphs[-1].decode()}_FCEW000__0" if graphs else earlier.replace("FCEW000", "REP0001")
            if name == earlier:
                name = earlier.replace("REP0001", "FCEW001")
        end = at
        memory = sum(size for section, _, size in sections if section.startswith(_DEVICE_MEMORY))
        found.append(Part(name, table[0] / ticks, table[20] / ticks, memory))
    return found


def _sections(data: bytes, base: int) -> Iterator[tuple[str, int, int]]:
    """Name, offset in the file, and size of each section; memory that a run needs has a size and no content."""
    (table,) = struct.unpack_from("<Q", data, base + 0x28)
    size, count, names = struct.unpack_from("<HHH", data, base + 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, base + table + number * size) for number in range(count)]
    if names >= count:
        raise ValueError("no section has the names")
    texts = base + headers[names][4]
    for name, _, _, _, offset, length, *_ in headers:
        start = texts + name
        yield data[start : data.index(b"\0", start)].decode().lstrip("."), offset, length


# NPUW names a part by its graph and its function: "REP" for one that is called for many layers, "FCEW" for one that is
# called once. The graph of the prompt may have one attention for each length of what was computed before.
_NPUW_PART = re.compile(r"Model\d+_(kv(?P<window>\d+)|prefill|lm_head)_(?P<function>(REP|FCEW)\w+?)__")
_MATRIX = "lm_head"

# A binary without weights has a part that prepares them when it is loaded.
_PREPARATION = re.compile(r"_init_\d+$")

Times = tuple[float, float]


def runs(parts: Sequence[Part]) -> list[Part]:
    """The parts that a request runs."""
    return [part for part in parts if not _PREPARATION.search(part.name)]


@dataclass(frozen=True)
class Decoder:
    """The parts of a decoder by graph: `prefill` computes a chunk of a prompt, `kv1152` a token in such a window.

    Where the matrix that chooses a token is a graph of its own, it is `lm_head`. All times are milliseconds at the
    lowest and the highest frequency.
    """

    graphs: dict[str, list[Part]]
    layers: int

    @classmethod
    def of(cls, parts: Sequence[Part], layers: int) -> Decoder | None:
        """None where no part is of a decoder."""
        graphs: dict[str, list[Part]] = {}
        for part in parts:
            if match := _NPUW_PART.match(part.name):
                graphs.setdefault(match[1], []).append(part)
        return cls(graphs, layers) if "prefill" in graphs else None

    def parts(self) -> list[Part]:
        return [part for graph in self.graphs.values() for part in graph]

    def token(self) -> Times:
        """A token in the longest window."""
        windows = {int(name[2:]): name for name in self.graphs if name.startswith("kv")}
        return _sum([self._run(windows[max(windows)], -1), self._run(_MATRIX, -1)])

    def prompt(self, chunks: int) -> Times:
        """A prompt that fills its window, computed in `chunks`."""
        return _sum([*(self._run("prefill", chunk) for chunk in range(chunks)), self._run(_MATRIX, -1)])

    def _run(self, graph: str, chunk: int) -> Times:
        """All parts of a graph, each as often as there are layers for it; `chunk`: which attention, -1 for the last."""
        by_function: dict[str, list[Part]] = {}
        for part in self.graphs.get(graph, ()):
            by_function.setdefault(part.name, []).append(part)
        # Where attention is a part of its own, each layer has it; the rest of a layer ends with the next one's start.
        separate = sum("REP" in name for name in by_function) > 1
        found = []
        for name, variants in by_function.items():
            variants.sort(key=lambda part: part.fast_ms)
            part = variants[min(chunk, len(variants) - 1)]
            times = 1
            if "REP" in name:
                times = self.layers if separate else self.layers - 1
                separate = False
            found.append((part.slow_ms * times, part.fast_ms * times))
        return _sum(found)


def _sum(times: Sequence[Times]) -> Times:
    return sum(slow for slow, _ in times), sum(fast for _, fast in times)
