"""`npu-client embed`: embed texts given as arguments, the lines of standard input, or a file.

With --in and --out it can be interrupted and started again: what is done is kept beside the output until all is.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from backend_client.cli.flags import add_call_options, call_options
from backend_client.client import InferenceClient
from backend_client.errors import ConfigurationError
from backend_client.results import EmbedBatch, EmbedOptions
from backend_client.settings import ClientSettings

# Rows in memory at a time: 8,192 of 1,024 dimensions are 32 MB.
_ROWS = 8192


@dataclass(frozen=True, slots=True)
class Rows:
    """What is written. `vectors` is float32 (n, d); `ids` has one for each row, None where the input had none."""

    vectors: npt.NDArray[np.float32]
    ids: Iterator[Any]
    space: str
    model: str

    def chunks(self) -> Iterator[tuple[int, list[Any], npt.NDArray[np.float32]]]:
        """(first index, ids, vectors) of some rows at a time."""
        for start in range(0, len(self.vectors), _ROWS):
            vectors = self.vectors[start : start + _ROWS]
            yield start, list(islice(self.ids, len(vectors))), vectors


Write = Callable[[Path, Rows], None]


def writer_for(path: Path) -> Write:
    """The writer for a file's suffix. Raises ConfigurationError for another one, or when pyarrow is missing for it."""
    writers: dict[str, Write] = {".npy": _npy, ".jsonl": _jsonl, ".parquet": _parquet}
    if path.suffix not in writers:
        raise ConfigurationError(f"{path.name}: the output is one of {', '.join(writers)}")
    if path.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise ConfigurationError("parquet needs pyarrow: pip install 'npu-node[parquet]', or choose .npy or .jsonl")
    return writers[path.suffix]


def _npy(path: Path, rows: Rows) -> None:
    out = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=rows.vectors.shape)
    for start, _, vectors in rows.chunks():
        out[start : start + len(vectors)] = vectors
    out.flush()


def _jsonl(path: Path, rows: Rows) -> None:
    with path.open("w", encoding="utf-8") as out:
        for start, ids, vectors in rows.chunks():
            for offset, (identity, vector) in enumerate(zip(ids, vectors, strict=True)):
                named = {} if identity is None else {"id": identity}
                line = {"index": start + offset, **named, "space": rows.space, "embedding": vector.tolist()}
                out.write(json.dumps(line, ensure_ascii=False) + "\n")


def _parquet(path: Path, rows: Rows) -> None:
    # Only who asks for parquet has pyarrow.
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.parquet as pq  # noqa: PLC0415

    vector_type = pa.list_(pa.float32(), rows.vectors.shape[1])
    schema = pa.schema(
        [("index", pa.int64()), ("id", pa.string()), ("embedding", vector_type)],
        metadata={"space": rows.space, "model": rows.model},
    )
    with pq.ParquetWriter(path, schema) as out:
        for start, ids, vectors in rows.chunks():
            flat = pa.array(np.ascontiguousarray(vectors).reshape(-1), pa.float32())
            columns = [
                pa.array(range(start, start + len(vectors)), pa.int64()),
                pa.array([None if identity is None else str(identity) for identity in ids], pa.string()),
                pa.FixedSizeListArray.from_arrays(flat, type=vector_type),
            ]
            out.write_table(pa.Table.from_arrays(columns, schema=schema))


# Embedding a file into a file, resumable.
#
# Vectors are appended as raw float32 to OUT.part, and OUT.part.json says what they are; when all are there the output
# is
# written from them under another name and renamed, so that it is either whole or not there.


@dataclass(frozen=True, slots=True)
class _State:
    """What the vectors that are done belong to: they may be continued only if all of it is the same.

    `requested` is the model that was asked for, None for the default; `model` the one that answered.
    """

    source: str
    size: int
    modified_ns: int
    model: str
    space: str
    dimensions: int
    requested: str | None = None


class EmbedFile:
    """One input and one output. Raises ConfigurationError for files that cannot be read, written or continued."""

    def __init__(self, source: Path, out: Path) -> None:
        if source.is_dir():
            raise ConfigurationError(f"the input {source} is a directory: give one file, or use embed-dataset")
        if not source.is_file():
            raise ConfigurationError(f"the input {source} does not exist")
        self._source = source
        self._out = out
        self._write = writer_for(out)
        self._part = out.with_name(out.name + ".part")
        self._state_file = out.with_name(out.name + ".part.json")
        self._state = self._read_state()

    def space_to_continue(self) -> dict[str, str]:
        """The vector space that the vectors which are done bind the model to, by the name that was asked for."""
        return {self._state.requested or self._state.model: self._state.space} if self._state else {}

    async def run(self, client: InferenceClient, **options: Unpack[EmbedOptions]) -> None:
        """Embed what is not done yet, then write the output. Shows progress on standard error."""
        if self._state:
            name = self._state.requested or self._state.model
            if options.get("model") not in {None, name}:
                raise ConfigurationError(f"{self._part} holds vectors of {name}: delete it to start over")
            options["model"] = name
        requested = options.get("model")
        total = sum(1 for _ in self._texts())
        done = self._done()
        began, start = time.monotonic(), done
        with self._part.open("ab") as part:
            async for batch in client.embed_stream(self._texts(done), **options):
                if self._state is None:
                    self._begin(batch, requested)
                part.write(batch.vectors.astype("<f4", copy=False).tobytes())
                part.flush()
                done += len(batch.vectors)
                _show(done, total, (done - start) / (time.monotonic() - began))
        self._finish(total)
        print(f"{total} texts ({start} of them done before) in {self._out}", file=sys.stderr)

    def _finish(self, total: int) -> None:
        dimensions = self._state.dimensions if self._state else 0
        vectors = np.fromfile(self._part, "<f4") if not total else np.memmap(self._part, "<f4", mode="r")
        rows = Rows(
            vectors=vectors.reshape(total, dimensions),
            ids=(identity for identity, _ in self._entries()),
            space=self._state.space if self._state else "",
            model=self._state.model if self._state else "",
        )
        unfinished = self._out.with_name(self._out.name + ".tmp")
        self._write(unfinished, rows)
        unfinished.replace(self._out)
        self._part.unlink()
        self._state_file.unlink(missing_ok=True)

    def _begin(self, batch: EmbedBatch, requested: str | None) -> None:
        found = self._source.stat()
        self._state = _State(
            source=str(self._source.resolve()),
            size=found.st_size,
            modified_ns=found.st_mtime_ns,
            model=batch.model,
            space=batch.space,
            dimensions=batch.vectors.shape[1],
            requested=requested,
        )
        self._state_file.write_text(json.dumps(asdict(self._state)), encoding="utf-8")

    def _read_state(self) -> _State | None:
        if not self._state_file.is_file():
            # Vectors without a word on what they are cannot be continued.
            self._part.unlink(missing_ok=True)
            return None
        state = _State(**json.loads(self._state_file.read_text(encoding="utf-8")))
        found = self._source.stat()
        if (state.source, state.size, state.modified_ns) != (
            str(self._source.resolve()),
            found.st_size,
            found.st_mtime_ns,
        ):
            raise ConfigurationError(f"{self._part} was begun from another input: delete it to start over")
        return state

    def _done(self) -> int:
        """How many vectors are complete; a row that was being written when the program died is cut off."""
        if self._state is None or not self._part.is_file():
            return 0
        row = 4 * self._state.dimensions
        rows = self._part.stat().st_size // row
        with self._part.open("ab") as part:
            part.truncate(rows * row)
        return rows

    def _texts(self, skip: int = 0) -> Iterator[str]:
        for index, (_, text) in enumerate(self._entries()):
            if index >= skip:
                yield text

    def _entries(self) -> Iterator[tuple[Any, str]]:
        """Each entry's id (None where it has none) and text."""
        with self._source.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if self._source.suffix == ".txt":
                    yield None, line.rstrip("\n")
                    continue
                try:
                    entry = json.loads(line)
                except ValueError:
                    entry = None
                if isinstance(entry, str):
                    yield None, entry
                elif isinstance(entry, dict) and isinstance(entry.get("text"), str):
                    yield entry.get("id"), entry["text"]
                else:
                    raise ConfigurationError(f"{self._source}, line {number}: neither a string nor an object with text")


def _show(done: int, total: int, rate: float) -> None:
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\r{done} of {total} texts, {rate:.0f} a second ", end=end, file=sys.stderr, flush=True)


# `npu-client embed`: embed texts given as arguments, the lines of standard input, or a file.
#
# With --in and --out it can be interrupted and started again: what is done is kept beside the output until all is.


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser("embed", help="embed texts", description=__doc__)
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="texts; without any, each line of standard input")
    parser.add_argument(
        "--in", type=Path, dest="source", metavar="FILE", help="JSON lines (a string, or an object with text) or .txt"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help=".npy, .jsonl or .parquet")
    parser.add_argument("--truncate", action="store_true", help="cut texts that are too long")
    add_call_options(parser)
    parser.set_defaults(run=run)


async def run(args: argparse.Namespace, settings: ClientSettings) -> int:
    """Embed into the file, or print one JSON object a text; who embedded them goes to standard error."""
    if (args.source is None) != (args.out is None) or (args.source is not None and args.texts):
        raise ConfigurationError("embed takes TEXTs, or --in and --out together")
    if args.source is not None:
        work = EmbedFile(args.source, args.out)
        spaces = settings.spaces | work.space_to_continue()
        async with InferenceClient.from_settings(settings.model_copy(update={"spaces": spaces})) as client:
            await work.run(client, truncate=args.truncate, **call_options(args))
        return 0
    texts = args.texts or [line.rstrip("\n") for line in sys.stdin]
    async with InferenceClient.from_settings(settings) as client:
        result = await client.embed_many_result(texts, truncate=args.truncate, **call_options(args))
    for index, vector in enumerate(result.vectors):
        print(json.dumps({"index": index, "space": result.space, "embedding": vector.tolist()}))
    served = ", ".join(f"{count} by {node}" for node, count in result.served.items())
    print(f"{len(texts)} texts, {result.usage.prompt_tokens} tokens: {served}", file=sys.stderr)
    return 0
