"""What Intel's NPU compiler makes of the graphs and properties that a node sends, for NPUs that are not here.

`python -m tests.wine.npu_compiler` compiles all rows and writes docs/lab/npu-compiled.json and the tables of
docs/npu-compiled.md. tests/wine/test_npu_compiler.py compares against the former.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from tests.real.colour_vision import kept_colours
from tests.support.cross_encoders import write_minilm
from tests.support.foreign import kept
from tests.wine.npu_binary import Part, parts_of
from tests.wine.windows import ROOT, Windows, windows, windows_path
from worker_node.models.directory import MANIFEST_FILE
from worker_node.models.store import ModelStore

KNOWN = ROOT / "docs" / "lab" / "npu-compiled.json"
PAGE = ROOT / "docs" / "npu-compiled.md"
PLATFORMS = {"3720": "Meteor, Arrow Lake", "4000": "Lunar Lake", "5010": "Panther Lake", "5020": "Wildcat Lake"}
SMALL = ("3720", "4000", "5010")
SLOWER, LARGER = 1.25, 2.0


class Row(msgspec.Struct, frozen=True):
    """A model with options of `[[models]]`, compiled for each of `platforms`; a `small` one in CI, too.

    `layers` are those of a model that generates. After `limit_s` a compile has not finished.
    """

    name: str
    model: str
    options: dict[str, Any] = {}
    layers: int = 0
    small: bool = False
    limit_s: float = 900.0
    platforms: tuple[str, ...] = tuple(PLATFORMS)


class Result(msgspec.Struct, frozen=True, omit_defaults=True):
    """What came of one compile. `ms` and `tokens_per_s` are the compiler's predictions at the lowest and the highest
    frequency: of all parts run once, and of a long answer where the parts are those of a decoder that repeats a layer.
    """

    problem: str | None = None
    cpu_s: float = 0.0
    mb: float = 0.0
    device_mib: float = 0.0
    parts: int = 0
    ms: tuple[float, float] = (0.0, 0.0)
    tokens_per_s: tuple[float, float] | None = None


EMBEDDER, GENERATOR, SPEECH = "all-minilm-l6-v2", "smollm2-135m-instruct", "whisper-tiny.en"
RERANKER, VISION = "reranker", "colours"
ROWS = (
    *(Row(f"embeddings, {n} tokens", EMBEDDER, {"npu_buckets": [n]}, small=True) for n in (32, 256)),
    Row("rerank, 512 tokens", RERANKER, {"npu_buckets": [512]}, small=True),
    Row("chat, prompts of 1,024", GENERATOR, {"max_prompt_len": 1024}, layers=30, small=True),
    Row("speech", SPEECH),
    Row("vision", VISION, {"max_prompt_len": 1024}),
)


def compile_row(installation: Windows, row: Row, platform: str, store: Path) -> Result:
    """Compile a row under Wine as the node's engine does."""
    installation.drive.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=installation.drive) as out:
        job = {
            "model": row.model,
            "store": windows_path(store),
            "options": row.options | _path_of(store / row.model),
            "platform": platform,
            "out": f"C:\\{Path(out).name}",
        }
        done = installation.run("-m", "tests.wine.compile_job", json.dumps(job), timeout=row.limit_s)
        lines = [line for line in done.stdout.splitlines() if line.startswith('{"cpu_s"')]
        if not lines:
            return Result(problem=f"the compiler ended with status {done.returncode}: {done.stdout[-300:].strip()}")
        found = json.loads(lines[-1])
        binaries = [path.read_bytes() for path in sorted(Path(out).rglob("*.blob"))]
    if found["problem"] is not None or not binaries:
        return Result(problem=found["problem"] or "no binary was written", cpu_s=found["cpu_s"])
    parts = [part for binary in binaries for part in parts_of(binary)]
    return Result(
        cpu_s=found["cpu_s"],
        mb=round(sum(map(len, binaries)) / 1e6, 1),
        device_mib=round(sum(part.device_bytes for part in parts) / 2**20, 1),
        parts=len(parts),
        ms=(round(sum(part.slow_ms for part in parts), 2), round(sum(part.fast_ms for part in parts), 2)),
        tokens_per_s=_tokens_per_s(parts, row.layers),
    )


def _path_of(directory: Path) -> dict[str, str]:
    """The option that names a model which was not pulled."""
    return {} if (directory / MANIFEST_FILE).is_file() else {"path": windows_path(directory)}


def _tokens_per_s(parts: list[Part], layers: int) -> tuple[float, float] | None:
    """The rate of a decoder: its first part, the repeated layer, the last, and the matrix that chooses the token.

    None for a model whose parts are not these three twice, for a token and for the prompt, and the matrix.
    """
    if len(parts) != 7 or layers < 3:
        return None
    first, repeated, last = parts[:3]
    matrix = parts[-1]

    def rate(ms: Iterable[float]) -> float:
        once, many, end, choice = ms
        return round(1e3 / (once + (layers - 1) * many + end + choice), 1)

    decoder = (first, repeated, last, matrix)
    return rate(part.slow_ms for part in decoder), rate(part.fast_ms for part in decoder)


def unfinished(row: Row) -> Result:
    """The result of a compile that took too long."""
    return Result(problem=f"not finished in {row.limit_s:.0f} s", cpu_s=row.limit_s)


def result_of(installation: Windows, row: Row, platform: str, store: Path) -> Result:
    """What came of one row on one platform, a compile that does not end included."""
    try:
        return compile_row(installation, row, platform, store)
    except TimeoutError:
        return unfinished(row)


def model_store() -> Path:
    """A store with the embedded models, Whisper where it is installed, a reranker and a model that takes images."""
    embedded = ModelStore()

    def make(directory: Path) -> None:
        for name in (EMBEDDER, GENERATOR):
            shutil.copytree(embedded.get(name).path, directory / name)
        if (embedded.root / SPEECH).is_dir():
            shutil.copytree(embedded.root / SPEECH, directory / SPEECH)
        write_minilm(directory / RERANKER, embedded.get(EMBEDDER).path)
        shutil.copytree(kept_colours(embedded), directory / VISION)

    return kept("npu-compiler-models", make, "1")


def differences(row: str, known: Result | None, found: Result) -> list[str]:
    """What is worse than what is known of this row, in words; none where it is as good."""
    if known is None:
        return [f"{row}: it is not in {KNOWN.name}; write the table anew"]
    if found.problem != known.problem:
        return [f"{row}: {found.problem or 'it compiles now; write the table anew'}"]
    worse = []
    if found.ms[1] > known.ms[1] * SLOWER:
        worse.append(f"{row}: a run is predicted to take {found.ms[1]} ms, it was {known.ms[1]} ms")
    if found.tokens_per_s and known.tokens_per_s and found.tokens_per_s[1] * SLOWER < known.tokens_per_s[1]:
        worse.append(f"{row}: {found.tokens_per_s[1]} tokens/s are predicted, it was {known.tokens_per_s[1]}")
    if found.mb > known.mb * LARGER:
        worse.append(f"{row}: the binary has {found.mb} MB, it had {known.mb} MB")
    return worse


def read_known() -> dict[str, dict[str, Result]]:
    """The committed results by row and platform."""
    return msgspec.json.decode(KNOWN.read_bytes(), type=dict[str, dict[str, Result]])


def table(results: Mapping[str, Mapping[str, Result]]) -> str:
    """The tables of the page."""
    lines = [
        "| what is compiled | NPU | compiles | CPU s | binary, MB | device, MiB | a run, ms | tokens/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row, by_platform in results.items():
        for platform, result in by_platform.items():
            if result.problem is not None:
                lines.append(f"| {row} | {platform} | no: {result.problem} | {result.cpu_s:.0f} | | | | |")
                continue
            speed = "" if result.tokens_per_s is None else f"{result.tokens_per_s[0]} to {result.tokens_per_s[1]}"
            lines.append(
                f"| {row} | {platform} | yes | {result.cpu_s:.0f} | {result.mb} | {result.device_mib} "
                f"| {result.ms[1]} to {result.ms[0]} | {speed} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--row", action="append", help="only rows with this in their name; the others stay as they are")
    parser.add_argument("--platform", action="append", choices=tuple(PLATFORMS), help="only this one; may be repeated")
    args = parser.parse_args()
    results = read_known() if KNOWN.is_file() else {}
    store, installation = model_store(), windows()
    for row in ROWS:
        if args.row and not any(part in row.name for part in args.row):
            continue
        for platform in row.platforms:
            if args.platform and platform not in args.platform:
                continue
            found = result_of(installation, row, platform, store)
            results.setdefault(row.name, {})[platform] = found
            print(row.name, platform, found, file=sys.stderr, flush=True)
            ordered = {each.name: results[each.name] for each in ROWS if each.name in results}
            KNOWN.write_bytes(msgspec.json.format(msgspec.json.encode(ordered), indent=1) + b"\n")
    text, start, rest = PAGE.read_text().partition("<!-- table -->\n")
    _, end, after = rest.partition("<!-- end of table -->\n")
    PAGE.write_text(text + start + table(ordered) + end + after)


if __name__ == "__main__":
    main()
