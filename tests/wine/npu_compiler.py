"""What Intel's NPU compiler makes of the graphs and properties that a node sends, for NPUs that are not here.

`python -m tests.wine.npu_compiler` compiles all rows and writes docs/lab/npu-compiled.json and the tables of
docs/lab/npu-compiled.md. tests/wine/test_npu_compiler.py compares against the former.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tests.conftest import USERS_STORE
from tests.real.colour_vision import kept_colours
from tests.support.cross_encoders import write_minilm
from tests.support.foreign import kept, output_of
from tests.support.whisper import install_whisper
from tests.wine.npu_binary import Decoder, Part, Times, parts_of, runs
from tests.wine.windows import ROOT, Windows, printed_by, windows, windows_path
from worker_node.certify.predictions import Prediction
from worker_node.models.catalog import Catalog
from worker_node.models.directory import MANIFEST_FILE, peek_config
from worker_node.models.store import ModelStore

KNOWN = ROOT / "docs" / "lab" / "npu-compiled.json"
PAGE = ROOT / "docs" / "lab" / "npu-compiled.md"
PREDICTIONS = ROOT / "worker_node" / "certify" / "predictions.json"
PLATFORMS = {"3720": "Meteor, Arrow Lake", "4000": "Lunar Lake", "5010": "Panther Lake", "5020": "Wildcat Lake"}
SMALL = ("3720", "4000", "5010")
SLOWER, LARGER = 1.25, 2.0
# On a machine that is shared a compile may take many times its CPU time.
HUNG_S = 3600


class Row(msgspec.Struct, frozen=True):
    """A model with options of `[[models]]` and `properties` of its placement, compiled for each of `platforms`.

    A `small` one is compiled in CI, too. A compile has not finished after `limit_s` seconds of CPU time. `exported`: as
    `npu-node compile` does it.
    """

    name: str
    model: str
    options: dict[str, Any] = {}
    properties: dict[str, str] = {}
    small: bool = False
    exported: bool = False
    limit_s: int = 600
    platforms: tuple[str, ...] = tuple(PLATFORMS)


class Result(msgspec.Struct, frozen=True, omit_defaults=True):
    """What came of one compile, with the compiler's predictions at the lowest and the highest frequency.

    `ms` is the time of a run: of an encoder, of a prompt that fills its window, of half a minute of speech up to the
    first token. `tokens_per_s` are those that a decoder generates at the end of its window.
    """

    problem: str | None = None
    cpu_s: float = 0.0
    mb: float = 0.0
    device_mib: float = 0.0
    ms: Times = (0.0, 0.0)
    tokens_per_s: Times | None = None


EMBEDDER, GENERATOR, SPEECH = "all-minilm-l6-v2", "smollm2-135m-instruct", "whisper-tiny.en"
RERANKER, VISION = "reranker", "colours"
LUNAR, LATER = ("4000",), ("4000", "5010", "5020")


def embeddings(length: int, said: str = "", **more: Any) -> Row:
    options = {"npu_buckets": [length], **more.pop("options", {})}
    return Row(f"embeddings, {length} tokens{said}", EMBEDDER, options, **more)


def chat(
    window: int, form: str = "", small: bool = False, limit_s: int = 600, on: Sequence[str] = LUNAR, **options: Any
) -> Row:
    """Prompts of a window, with the node's default for what is not in `options`."""
    said = [
        form,
        *(f"{name} {str(value).lower() if isinstance(value, bool) else value}" for name, value in options.items()),
    ]
    return Row(
        ", ".join([f"chat, prompts of {window}", *filter(None, said)]),
        f"{GENERATOR}-{form}" if form else GENERATOR,
        {"max_prompt_len": window, **options},
        small=small,
        limit_s=limit_s,
        platforms=tuple(on),
    )


def speech(said: str, **options: Any) -> Row:
    """All parts: a node sets no NPUW, but then nothing is compiled after the encoder, since no device is here."""
    return Row(f"speech, NPU_USE_NPUW{said}", SPEECH, options, {"NPU_USE_NPUW": "YES"}, platforms=LATER)


ROWS = (
    embeddings(16),
    embeddings(24, platforms=LUNAR),
    embeddings(32, small=True),
    embeddings(64, platforms=LUNAR),
    embeddings(128, platforms=LUNAR),
    embeddings(256, small=True),
    embeddings(256, ", one run at a time", options={"infer_requests": 1}),
    embeddings(256, ", 64 texts in a run", options={"npu_batch_size": 64}, limit_s=100, platforms=LUNAR),
    embeddings(256, ", npu-node compile", exported=True, platforms=LUNAR),
    Row("rerank, 128 tokens", RERANKER, {"npu_buckets": [128]}, platforms=LUNAR),
    Row("rerank, 512 tokens", RERANKER, {"npu_buckets": [512]}, small=True),
    chat(1024, small=True, on=PLATFORMS),
    chat(1024, enable_prefix_caching=True, on=["3720"]),
    chat(1024, enable_prefix_caching=False),
    chat(1024, enable_prefix_caching=True, prefill_chunk_size=128, on=["3720"]),
    chat(1024, "int4_sym"),
    chat(1024, "int8_sym"),
    chat(1024, generate_hint="FAST_COMPILE"),
    chat(1024, generate_hint="BEST_PERF"),
    chat(2048, on=["3720", "4000"]),
    # Prompts above 2,048 tokens have pyramid attention where nothing is set.
    chat(4096, on=PLATFORMS),
    chat(4096, limit_s=100, on=LATER, prefill_attention_hint="STATIC"),
    chat(8192, limit_s=1500, on=PLATFORMS),
    Row("speech, encoder", SPEECH),
    speech(""),
    speech(", word_timestamps", word_timestamps=True),
    Row("vision", VISION, {"max_prompt_len": 1024}, platforms=("3720", "4000")),
)


def compile_row(installation: Windows, row: Row, platforms: Sequence[str]) -> dict[str, Result]:
    """Compile a row under Wine as the node's engine does, for one platform after another in one process."""
    store = store_with(row.model)
    pulled = (store / row.model / MANIFEST_FILE).is_file()
    installation.drive.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=installation.drive) as room:
        job = {
            "model": row.model,
            "store": windows_path(store),
            "options": row.options | ({} if pulled else {"path": windows_path(store / row.model)}),
            "properties": row.properties,
            "platforms": platforms,
            "out": f"C:\\{Path(room).name}",
            "exported": row.exported,
        }
        process = installation.start("-m", "tests.wine.compile_job", json.dumps(job))
        limit = row.limit_s * len(platforms)
        resource.prlimit(process.pid, resource.RLIMIT_CPU, (limit, limit))
        output = printed_by(process, HUNG_S)
        lines = _lines(output)
        found = {line["platform"]: _result(row, line, Path(room) / line["platform"], store) for line in lines}
    if process.returncode in {-signal.SIGKILL, -signal.SIGXCPU}:
        unfinished = Result(problem=f"not finished in {row.limit_s} s", cpu_s=row.limit_s)
        return {platform: found.get(platform, unfinished) for platform in platforms}
    if len(found) < len(platforms):
        raise RuntimeError(f"the compiler ended with status {process.returncode}: {output[-2000:].strip()}")
    return found


def _lines(output: str) -> list[dict[str, Any]]:
    """What the job printed of each platform; a refusal in the words of the compiler's own log."""
    lines, logged = [], []
    for text in output.splitlines():
        if "[vpux-compiler] " in text:
            logged.append(text.partition("[vpux-compiler] ")[2])
        if not text.startswith('{"platform"'):
            continue
        line = json.loads(text)
        if line["problem"] is not None:
            line["problem"] = logged[0] if logged else line["problem"].rpartition("Compiler returned msg: ")[2]
        lines.append(line)
        logged = []
    return lines


def _result(row: Row, line: Mapping[str, Any], out: Path, store: Path) -> Result:
    binaries = [path.read_bytes() for path in sorted(out.rglob("*.blob"))]
    if line["problem"] is not None or not binaries:
        return Result(problem=line["problem"] or "no binary was written", cpu_s=line["cpu_s"])
    parts = runs([part for binary in binaries for part in parts_of(binary)])
    ms, tokens_per_s = _predicted(parts, line["engine"], store / row.model)
    return Result(
        cpu_s=line["cpu_s"],
        mb=round(sum(map(len, binaries)) / 1e6, 1),
        device_mib=round(sum(part.device_bytes for part in parts) / 2**20, 1),
        ms=_rounded(ms),
        tokens_per_s=tokens_per_s,
    )


def _predicted(parts: list[Part], engine: Mapping[str, Any], directory: Path) -> tuple[Times, Times | None]:
    config = peek_config(directory / "config.json")
    layers = config.get("num_hidden_layers") or config.get("text_config", {}).get("num_hidden_layers", 0)
    decoder = Decoder.of(parts, layers)
    others = [part for part in parts if decoder is None or part not in decoder.parts()]
    ms = sum(part.slow_ms for part in others), sum(part.fast_ms for part in others)
    if decoder is None:
        return ms, None
    prompt = decoder.prompt(_chunks(engine))
    slow, fast = decoder.token()
    return (ms[0] + prompt[0], ms[1] + prompt[1]), _rounded((1e3 / slow, 1e3 / fast))


def _chunks(options: Mapping[str, Any]) -> int:
    """In how many steps the engine computes a prompt that fills its window; OpenVINO's own chunks have 1,024 tokens."""
    window = options.get("max_prompt_len") or 0
    chunk = window if options.get("prefill_hint") == "STATIC" else options.get("prefill_chunk_size") or 1024
    return max(1, -(-window // max(1, chunk)))


def _rounded(times: Times) -> Times:
    return round(times[0], 2), round(times[1], 2)


def model_store() -> Path:
    """The user's store, which has the embedded models."""
    return ModelStore(Path(USERS_STORE)).root


def store_with(model: str) -> Path:
    """The store that has it: the user's for the embedded ones, else one that is made once."""
    embedded = ModelStore(model_store())
    if model in {EMBEDDER, GENERATOR}:
        return embedded.root
    if model == VISION:
        return kept_colours(embedded).parent

    def make(directory: Path) -> None:
        if model == SPEECH:
            install_whisper(ModelStore(directory))
        elif model == RERANKER:
            write_minilm(directory / RERANKER, embedded.get(EMBEDDER).path)
        else:
            form = model.removeprefix(f"{GENERATOR}-")
            pull = ("pull", GENERATOR, "--quantization", form, "--name", model, "--model-store", directory)
            output_of(sys.executable, "-m", "worker_node", *pull, NPU_NODE_URL="none")

    support = [ROOT / "tests" / "support" / name for name in ("whisper.py", "cross_encoders.py")]
    sources = [*support, *sorted((ROOT / "worker_node" / "models" / "convert").glob("*.py"))]
    recipe = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    return kept(f"compiled-{model}", make, recipe)


def differences(row: str, known: Result | None, found: Result) -> list[str]:
    """What is worse than what is known of this row, in words; none where it is as good."""
    if known is None:
        return [f"{row}: it is not in {KNOWN.name}; write the table again"]
    if found.problem != known.problem:
        return [f"{row}: {found.problem or 'it compiles now; write the table again'}"]
    worse = []
    slower = [(new, old) for new, old in zip(found.ms, known.ms, strict=True) if new > old * SLOWER]
    if slower:
        worse.append(f"{row}: a run is predicted to take {slower[-1][0]} ms, it was {slower[-1][1]} ms")
    if found.tokens_per_s and known.tokens_per_s and found.tokens_per_s[1] * SLOWER < known.tokens_per_s[1]:
        worse.append(f"{row}: {found.tokens_per_s[1]} tokens/s are predicted, it was {known.tokens_per_s[1]}")
    if found.mb > known.mb * LARGER:
        worse.append(f"{row}: the binary has {found.mb} MB, it had {known.mb} MB")
    return worse


def read_known() -> dict[str, dict[str, Result]]:
    """The committed results by row and platform."""
    return msgspec.json.decode(KNOWN.read_bytes(), type=dict[str, dict[str, Result]])


def write_known(results: Mapping[str, Mapping[str, Result]]) -> None:
    """Write the results of the rows that there are, the page and what certify compares with."""
    ordered = {
        row.name: {name: results[row.name][name] for name in row.platforms if name in results[row.name]}
        for row in ROWS
        if row.name in results
    }
    KNOWN.write_bytes(msgspec.json.format(msgspec.json.encode(ordered), indent=1) + b"\n")
    text, start, rest = PAGE.read_text().partition("<!-- table -->\n")
    _, end, after = rest.partition("<!-- end of table -->\n")
    PAGE.write_text(text + start + table(ordered) + end + after)
    PREDICTIONS.write_bytes(packaged(ordered))


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


def packaged(results: Mapping[str, Mapping[str, Result]]) -> bytes:
    """What certify compares with: the catalog's models with the node's own options but for lengths, one a line."""
    found = []
    for row in ROWS:
        entry, lengths = Catalog.load().find(row.model), {"npu_buckets", "max_prompt_len"}
        if entry is None or row.exported or not row.options or not row.options.keys() <= lengths:
            continue
        (length,) = row.options.values()
        tokens = length if isinstance(length, int) else length[0]
        found += [
            Prediction(entry.id, entry.quantization, platform, tokens, result.ms, result.tokens_per_s)
            for platform, result in results.get(row.name, {}).items()
            if result.problem is None
        ]
    return b"[\n" + b",\n".join(map(msgspec.json.encode, found)) + b"\n]\n"


def chosen(names: Sequence[str] | None, platforms: Sequence[str] | None) -> list[tuple[Row, str]]:
    """The rows with one of these names, else with such a part in their names, for these platforms; None: all."""
    exact = {row.name for row in ROWS}

    def wanted(row: Row) -> bool:
        return not names or any(name == row.name or (name not in exact and name in row.name) for name in names)

    return [(row, each) for row in ROWS if wanted(row) for each in row.platforms if each in (platforms or PLATFORMS)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--row",
        action="append",
        help="only the row of this name, or those with this in their names; the others stay as they are",
    )
    parser.add_argument("--platform", action="append", choices=tuple(PLATFORMS), help="only this one; may be repeated")
    args = parser.parse_args(arguments)
    if not (cases := chosen(args.row, args.platform)):
        parser.error("no row has such a name and platform")
    installation = windows()
    for row, platform in cases:
        found = compile_row(installation, row, [platform])
        print(row.name, platform, found[platform], file=sys.stderr, flush=True)
        # Read again: other rows may have been written meanwhile.
        known = read_known()
        known[row.name] = known.get(row.name, {}) | found
        write_known(known)


if __name__ == "__main__":
    main()
