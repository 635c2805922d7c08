"""What `npu-node pull --check` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worker_node.models.prepare import Wish
    from worker_node.models.sources.check import Report

_VERDICTS = {True: "suitable", False: "not suitable", None: "not known"}


def report(wishes: Sequence[Wish], store: Path, *, as_json: bool) -> int:
    """Print a report for each; 1 if one would not fit on this machine."""
    from worker_node.models.sources.check import check

    reports = [check(wish, store) for wish in wishes]
    if as_json:
        import orjson

        print(orjson.dumps([asdict(found) for found in reports], option=orjson.OPT_INDENT_2).decode())
    else:
        print("\n\n".join(map(_text, reports)))
    return 1 if any(found.problems for found in reports) else 0


def _text(found: Report) -> str:
    from worker_node.models.sources.disk import in_gigabytes

    memory = "unknown" if found.memory_available is None else in_gigabytes(found.memory_available)
    largest = sorted(found.files.items(), key=lambda item: -item[1])
    lines = [
        ("model", found.model_id),
        ("source", f"{found.source} ({found.format})"),
        ("licence", found.licence),
        ("files", f"{len(found.files)}, {in_gigabytes(sum(found.files.values()))}"),
        *(("", f"{in_gigabytes(size):>10}  {name}") for name, size in largest[:8]),
        ("disk", f"needs {in_gigabytes(found.disk_needed)}, {in_gigabytes(found.disk_available)} free"),
        (
            "memory",
            f"up to {in_gigabytes(found.memory_to_convert)} to convert, about {in_gigabytes(found.memory_to_run)} to "
            f"run; {memory} available",
        ),
        ("context", "unknown" if found.context is None else f"{found.context} tokens"),
        ("NPU", f"{_VERDICTS[found.npu.suitable]}: {'; '.join(found.npu.reasons)}"),
        *(("problem", problem) for problem in found.problems),
    ]
    return "\n".join(f"{name:<10}{text}" for name, text in lines)
