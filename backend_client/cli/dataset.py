"""`npu-client embed-dataset` and `generate-dataset`: every row of many files, over the fleet.

Interrupted anywhere, the same command continues. Exit status: 0 complete, 1 failed, 2 wrong usage, 3 some fragments
are quarantined, 4 too many rows were rejected, 5 (of --status) not complete yet, 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Self

from backend_client.bulk import BulkReport, BulkRequest, Progress, run_job, status
from backend_client.cli.main import WrongUsage, add_sampling, sampling
from backend_client.errors import ConfigurationError
from backend_client.settings import ClientSettings

_EVERY_S = {"terminal": 0.2, "json": 5.0, "log": 30.0}


class Bar:
    """A progress line on standard error: redrawn in a terminal, else a new line every 30 s.

    In JSON, an object a line on standard output.
    """

    def __init__(self, *, as_json: bool) -> None:
        self._form = "json" if as_json else "terminal" if sys.stderr.isatty() else "log"
        self._began = self._last = time.monotonic()
        self._before: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._form == "terminal" and self._before is not None:
            print(file=sys.stderr)

    def update(self, progress: Progress) -> None:
        """Draw it, unless it was drawn a moment ago."""
        now = time.monotonic()
        if self._before is None:
            self._before, self._began = progress.done, now
        last = self._form != "log" and progress.done == progress.fragments
        if now - self._last < _EVERY_S[self._form] and not last:
            return
        self._last = now
        seconds = max(now - self._began, 1e-9)
        rate, here = progress.rows_now / seconds, progress.done - self._before
        left = seconds / here * (progress.fragments - progress.done) if here else None
        if self._form == "json":
            names = ("fragments", "done", "running", "rows", "rejected", "failures", "lost")
            shown = {name: getattr(progress, name) for name in names} | {"quarantined": len(progress.quarantined)}
            times = {"rows_per_second": round(rate, 1), "seconds_left": None if left is None else round(left)}
            print(json.dumps({"event": "progress", **shown, **times}), flush=True)
            return
        # `12/40 fragments, 300 rows/s, 2:13 left, 1 rejected`
        parts = [f"{progress.done}/{progress.fragments} fragments", f"{rate:.0f} rows/s"]
        parts.append(f"{clock_time(left)} left" if left is not None else f"{progress.running} under way")
        counts = {"rejected": progress.rejected, "failed": progress.failures, "quarantined": len(progress.quarantined)}
        line = ", ".join(parts + [f"{count} {name}" for name, count in counts.items() if count])
        if self._form == "log":
            print(f"npu-client: {line}", file=sys.stderr, flush=True)
        else:
            # Shorter than a line of what standard error is, so that it can be drawn over.
            columns = os.get_terminal_size(sys.stderr.fileno()).columns or 80
            print(f"\r{line[: columns - 1]}\x1b[K", end="", file=sys.stderr, flush=True)


def clock_time(seconds: float) -> str:
    """`1:02:03`, or `2:13`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def show_report(report: BulkReport, *, as_json: bool) -> None:
    """What came of a run, or how far a job is."""
    if as_json:
        print(json.dumps({"event": "report", **report.as_dict()}))
        return
    print(f"{report.done} of {report.fragments} fragments, {report.rows} rows, {report.rejected} rejected")
    for served, rows in report.served.items():
        print(f"{rows} rows by {served}")
    for node in report.excluded:
        print(f"excluded: {node} answers in another vector space")
    for fragment, reason in report.quarantined.items():
        print(f"quarantined: {fragment} ({reason})")
    if report.message:
        print(f"npu-client: {report.message}", file=sys.stderr)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    embed = commands.add_parser("embed-dataset", help="embed every row of many files", description=__doc__)
    embed.add_argument("--text-column", default="text", help="the column with the texts (text)")
    embed.add_argument("--truncate", action="store_true", help="cut texts that are too long instead of rejecting them")
    embed.set_defaults(run=run, kind="embed")
    generate = commands.add_parser("generate-dataset", help="answer every row of many files", description=__doc__)
    columns = generate.add_mutually_exclusive_group()
    columns.add_argument("--prompt-column", help="the column with the prompts (prompt)")
    columns.add_argument("--messages-column", help="the column with conversations: lists of messages, or their JSON")
    generate.add_argument("--max-tokens", type=int, help="tokens of each answer")
    add_sampling(generate)
    generate.add_argument("--response-schema", type=Path, metavar="FILE", help="JSON Schema that every answer follows")
    generate.set_defaults(run=run, kind="generate")
    for parser in (embed, generate):
        _add_common(parser)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="IN", help="files: a path, URL, directory or glob; Parquet, JSONL or text")
    parser.add_argument("out", metavar="OUT", help="directory or prefix of the output")
    parser.add_argument("--id-column", help="names rejected rows; else file and row do")
    parser.add_argument("--keep-columns", metavar="A,B", help="the input's columns to pass through (all)")
    parser.add_argument("--model", help="model; else the nodes' default")
    parser.add_argument("--require-device", choices=("NPU", "GPU", "CPU"), help="no other device may run it")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--shard", metavar="I/N", help="do part I of N, counted from 0")
    where.add_argument("--ray", metavar="ADDRESS", help="work on the machines of this Ray cluster")
    parser.add_argument("--rows-per-fragment", type=int, metavar="ROWS", help="rows that are committed at once")
    parser.add_argument("--window", type=int, default=2, help="fragments at once (2); on Ray one for each machine")
    parser.add_argument("--concurrency", type=int, help="requests under way at once (3 batches or 8 prompts a node)")
    parser.add_argument("--attempts", type=int, default=3, help="failures until a fragment is quarantined (3)")
    parser.add_argument("--max-rejected", type=float, default=0.001, metavar="SHARE", help="of the rows (0.001)")
    parser.add_argument("--patience", type=float, default=600.0, metavar="SECONDS", help="wait for a dead fleet (600)")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="for one request with its retries")
    parser.add_argument(
        "--allow-cloud",
        action="store_true",
        help="requests that no node can serve (a prompt, a batch of texts) may go to the cloud",
    )
    parser.add_argument("--status", action="store_true", help="show how far the job is, and do nothing")
    parser.add_argument("--json", action="store_true", help="print progress and the report as JSON, one object a line")


async def run(args: argparse.Namespace, settings: ClientSettings) -> int:
    try:
        request = _request(args)
    except ConfigurationError as error:
        raise WrongUsage(error.message) from None
    if args.status:
        found = await status(request)
        show_report(found, as_json=args.json)
        return int(found.exit_code)
    executor = None
    if args.ray is not None:
        # Imported lazily: Ray is an extra, and takes seconds to import.
        from backend_client.bulk.ray_executor import RayExecutor  # noqa: PLC0415

        executor = await RayExecutor.connect(args.ray, request, settings)
    with _interruptible(), Bar(as_json=args.json) as bar:
        report = await run_job(request, settings, executor=executor, on_progress=bar.update)
    show_report(report, as_json=args.json)
    return int(report.exit_code)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM, with which a machine or Kubernetes ends a job, is taken like Ctrl-C: status 130, and nothing is lost."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    terminated = False

    def terminate() -> None:
        nonlocal terminated
        terminated = True
        if task is not None:
            task.cancel()

    with contextlib.suppress(NotImplementedError):
        loop.add_signal_handler(signal.SIGTERM, terminate)
    try:
        yield
    except asyncio.CancelledError:
        if not terminated:
            raise
        raise KeyboardInterrupt from None
    finally:
        with contextlib.suppress(NotImplementedError):
            loop.remove_signal_handler(signal.SIGTERM)


def _request(args: argparse.Namespace) -> BulkRequest:
    messages = args.kind == "generate" and args.messages_column is not None
    if args.kind == "embed":
        column = args.text_column
        options: dict[str, Any] = {"truncate": True} if args.truncate else {}
    else:
        column = args.messages_column or args.prompt_column or "prompt"
        options = sampling(args, "max_tokens")
        if args.response_schema is not None:
            options["response_schema"] = _schema(args.response_schema)
    # Flags have the names of fields, but for these.
    given = {item.name: getattr(args, item.name) for item in fields(BulkRequest) if hasattr(args, item.name)}
    given |= {"column": column, "messages": messages, "options": options, "keep": None, "shard": None}
    if args.keep_columns is not None:
        given["keep"] = tuple(args.keep_columns.split(","))
        if not all(given["keep"]):
            raise ConfigurationError("--keep-columns names columns, such as id,title: a name is empty")
    if args.shard is not None:
        index, _, count = args.shard.partition("/")
        if not (index.isdecimal() and count.isdecimal()):
            raise ConfigurationError(f"--shard is I/N, such as 3/16, not {args.shard}")
        given["shard"] = int(index), int(count)
    return BulkRequest(**given)


def _schema(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        problem = f"{path} is not a readable JSON Schema: {error}"
    raise ConfigurationError(problem)
