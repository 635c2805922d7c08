"""`npu-client embed`: embed texts given as arguments, the lines of standard input, or a file.

With --in and --out it can be interrupted and started again: what is done is kept beside the output until all is.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from backend_client.bulk import BulkReport, BulkRequest, ExitCode, run_job
from backend_client.bulk.inputs import load_plan
from backend_client.bulk.job import BulkJob
from backend_client.bulk.optional import need
from backend_client.cli.dataset import Bar
from backend_client.cli.flags import add_call_options, call_options
from backend_client.client import InferenceClient
from backend_client.errors import ConfigurationError, NPUError
from backend_client.settings import ClientSettings

# Rows in memory at a time: 8,192 of 1,024 dimensions are 32 MB.
_ROWS = 8192
# What an interruption costs at most: some minutes.
ROWS_PER_FRAGMENT = 4096


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("embed", help="embed texts", description=__doc__)
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="texts; without any, each line of standard input")
    parser.add_argument(
        "--in", type=Path, dest="source", metavar="FILE", help="JSON lines (a string, or an object with text) or .txt"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help=".npy or .jsonl; embed-dataset writes Parquet")
    parser.add_argument("--truncate", action="store_true", help="cut texts that are too long")
    add_call_options(parser)
    parser.set_defaults(run=run)


async def run(args: argparse.Namespace, settings: ClientSettings) -> int:
    """Embed into the file, or print one JSON object a text; who embedded them goes to standard error."""
    if (args.source is None) != (args.out is None) or (args.source is not None and args.texts):
        raise ConfigurationError("embed takes TEXTs, or --in and --out together")
    if args.source is not None:
        await _embed_file(args, settings)
        return 0
    texts = args.texts or [line.rstrip("\n") for line in sys.stdin]
    async with InferenceClient.from_settings(settings) as client:
        result = await client.embed_many_result(texts, truncate=args.truncate, **call_options(args))
    for index, vector in enumerate(result.vectors):
        print(json.dumps({"index": index, "space": result.space, "embedding": vector.tolist()}))
    served = ", ".join(f"{count} by {node}" for node, count in result.served.items())
    print(f"{len(texts)} texts, {result.usage.prompt_tokens} tokens: {served}", file=sys.stderr)
    return 0


# A file is a small data set: its output is kept in OUT.part until every row is done, and becomes one file then.


async def _embed_file(args: argparse.Namespace, settings: ClientSettings) -> None:
    source, out = args.source, args.out
    if out.suffix not in _WRITERS:
        raise ConfigurationError(
            f"{out.name}: the output must be one of {', '.join(_WRITERS)}; embed-dataset writes Parquet"
        )
    if not source.is_file():
        problem = "is a directory: give one file, or use embed-dataset" if source.is_dir() else "does not exist"
        raise ConfigurationError(f"the input {source} {problem}")
    if not out.parent.is_dir():
        raise ConfigurationError(f"the directory {out.parent} of the output does not exist")
    part = out.with_name(out.name + ".part")
    request = BulkRequest(
        kind="embed",
        source=str(source),
        out=str(part),
        column="text",
        model=args.model,
        require_device=args.require_device,
        options={"truncate": True} if args.truncate else {},
        rows_per_fragment=ROWS_PER_FRAGMENT,
        max_rejected=0.0,
        patience=0.0,
        timeout=args.timeout,
        allow_cloud=True,
    )
    with Bar(as_json=False) as bar:
        report = await run_job(request, settings, on_progress=bar.update)
    if report.exit_code is not ExitCode.COMPLETE:
        raise NPUError(_problem(report, source, part))
    unfinished = out.with_name(out.name + ".tmp")
    job = BulkJob.load((part / "_job.json").read_bytes(), str(part))
    files = [part / fragment.name for fragment in load_plan((part / "_plan.json").read_bytes())]
    _WRITERS[out.suffix](unfinished, files, job)
    unfinished.replace(out)
    shutil.rmtree(part)
    print(f"{report.rows} texts ({report.rows - report.rows_now} of them done before) in {out}", file=sys.stderr)


def _problem(report: BulkReport, source: Path, part: Path) -> str:
    """Why not every row is embedded, with the line of the first that was rejected."""
    for path in sorted((part / "_rejected").glob("*.jsonl")):
        entry = json.loads(path.read_text().splitlines()[0])
        with source.open("rb") as file:
            number = file.read(entry["row"]).count(b"\n") + 1
        return f"{source}, line {number}: {entry['reason']}; correct it, and delete {part} to start over"
    return next(iter(report.quarantined.values()), report.message)


def _chunks(files: list[Path], job: BulkJob) -> Iterator[tuple[list[Any], Any]]:
    """(ids, vectors) of some rows at a time, in the order of the input; an id is None where there is none."""
    pq = need("pyarrow.parquet")
    for path in files:
        for batch in pq.ParquetFile(path).iter_batches(_ROWS):
            vectors = batch.column("embeddings").flatten().to_numpy(zero_copy_only=False)
            has_ids = "id" in batch.schema.names
            ids = batch.column("id").to_pylist() if has_ids else [None] * batch.num_rows
            yield ids, vectors.reshape(-1, job.dimensions)


def _write_npy(path: Path, files: list[Path], job: BulkJob) -> None:
    rows = sum(need("pyarrow.parquet").read_metadata(file).num_rows for file in files)
    out = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(rows, job.dimensions))
    start = 0
    for _, vectors in _chunks(files, job):
        out[start : start + len(vectors)] = vectors
        start += len(vectors)
    out.flush()


def _write_jsonl(path: Path, files: list[Path], job: BulkJob) -> None:
    index = 0
    with path.open("w", encoding="utf-8") as out:
        for ids, vectors in _chunks(files, job):
            for identity, vector in zip(ids, vectors, strict=True):
                named = {} if identity is None else {"id": identity}
                line = {"index": index, **named, "space": job.space, "embedding": vector.tolist()}
                out.write(json.dumps(line, ensure_ascii=False) + "\n")
                index += 1


_WRITERS: dict[str, Callable[[Path, list[Path], BulkJob], None]] = {
    ".npy": _write_npy,
    ".jsonl": _write_jsonl,
}
