"""One fragment from its rows to its committed file: read, validate, serve, write, commit. A pure function of both.

The rejected rows are committed before the data, under a name with their digest: the data file's metadata refers to
them. Two attempts may reject different rows (a node had a bad hour); what counts is what the file that won refers to.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol, TypeVar

from backend_client.bulk.answers import Results
from backend_client.bulk.inputs import Fragment
from backend_client.bulk.job import BulkJob, Chunk, Rejection, reached
from backend_client.bulk.output import METADATA_KEY, REJECTED, Receipt, committed
from backend_client.bulk.readers import CHUNK_ROWS, read
from backend_client.bulk.stores import OutputFailed, Store
from backend_client.bulk.window import cancelled, uninterrupted
from backend_client.bulk.writer import Writer
from backend_client.lifetime import in_daemon_thread

R = TypeVar("R")

# The disk, the quota or the largest file is full; the file system is read-only.
_LASTING = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG}


class Work(Protocol):
    """What is done with the inputs of rows."""

    @property
    def rows_ahead(self) -> int:
        """So many rows should be under way for the nodes never to wait; may change."""
        ...

    def problems(self, values: Sequence[Any]) -> dict[int, str]:
        """Which values cannot be sent, and why."""
        ...

    async def run(self, inputs: Sequence[Any]) -> Results:
        """The results of inputs without a problem."""
        ...


@dataclass(slots=True)
class _Served:
    """A chunk with its results: `kept` are its rows that have one, `answered` their places in the results."""

    chunk: Chunk
    results: Results
    kept: list[int]
    answered: list[int]
    rejected: list[Rejection]


@dataclass(slots=True)
class _Sums:
    rejected: list[Rejection] = field(default_factory=list)
    served: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    generated_tokens: int = 0
    npu_busy_us: int = 0

    def add(self, served: _Served) -> _Served:
        """Take in a chunk with its results, and return it."""
        results = served.results
        self.rejected += served.rejected
        self.served.update(results.served)
        self.tokens += results.tokens
        self.generated_tokens += sum(filter(None, results.num_generated_tokens))
        self.npu_busy_us += sum(filter(None, results.npu_busy_us))
        return served


async def process(fragment: Fragment, job: BulkJob, store: Store, work: Work) -> Receipt:
    """Serve the fragment and commit its file, unless another process was first.

    Raises OSError when the input cannot be read, OutputFailed when the output cannot be written, and NPUError when
    the fleet cannot serve it.
    """
    reached("fragment begun")
    began = time.monotonic()
    # Each hand-over to a thread costs as much as the work on a row or two: a small fragment does with three.
    writer = await _output(lambda: _opened(fragment, job, store))
    if isinstance(writer, Receipt):
        return writer
    try:
        sums, last = await _serve_rows(fragment, job, work, writer)
        rejected = b"".join(rejection.line(fragment.file.url) for rejection in sums.rejected)
        name = f"{fragment.id}.{hashlib.sha256(rejected).hexdigest()[:8]}.jsonl" if rejected else ""
        receipt = Receipt(
            fragment=fragment.id,
            rows=0,
            rejected=sum(rejection.count for rejection in sums.rejected),
            rejected_file=name,
            incomplete=sum(rejection.rest for rejection in sums.rejected),
            tokens=sums.tokens,
            generated_tokens=sums.generated_tokens,
            npu_busy_us=sums.npu_busy_us,
            seconds=round(time.monotonic() - began, 3),
            served=dict(sums.served),
        )
        return await _output(lambda: _commit(fragment, store, writer, last, receipt, rejected))
    except BaseException:
        # Another fragment's failure may cancel this one even here; the temporary file must be gone all the same.
        await uninterrupted(in_daemon_thread(writer.abandon, "abandon"))
        raise


def _opened(fragment: Fragment, job: BulkJob, store: Store) -> Writer | Receipt:
    """The writer of its file, or the receipt of the file that another process has committed."""
    return committed(store, fragment) or Writer(store.temporary(fragment.id), fragment, job)


async def _serve_rows(fragment: Fragment, job: BulkJob, work: Work, writer: Writer) -> tuple[_Sums, _Served | None]:
    """Read and serve all rows, with no more chunks in memory than the nodes need, and write them but for the last."""
    sums = _Sums()
    pending: deque[asyncio.Task[_Served]] = deque()
    last: _Served | None = None
    # Opens the file when it is first asked for a chunk.
    chunks = read(fragment, job)
    ended = False
    try:
        while not ended:
            found, ended = await in_daemon_thread(lambda: _next(chunks), "read input")
            for chunk in found:
                while len(pending) > -(-work.rows_ahead // CHUNK_ROWS):
                    await _write(sums.add(await pending.popleft()), writer)
                pending.append(asyncio.create_task(_serve(chunk, work)))
        reached("rows read")
        while pending:
            if last is not None:
                await _write(last, writer)
            last = sums.add(await pending.popleft())
        reached("rows served")
    finally:
        await cancelled(pending)
    return sums, last


def _next(chunks: Iterator[Chunk]) -> tuple[list[Chunk], bool]:
    """The next chunk, and whether it is the last; two if the first is short, which the last one is."""
    found: list[Chunk] = []
    for chunk in chunks:
        found.append(chunk)
        if len(found) == 2 or len(chunk.rows) + len(chunk.rejected) >= CHUNK_ROWS:
            return found, False
    return found, True


async def _serve(chunk: Chunk, work: Work) -> _Served:
    rejected = list(chunk.rejected)
    problems = work.problems(chunk.inputs)
    rejected += [Rejection(chunk.rows[row], problem, chunk.id_of(row)) for row, problem in problems.items()]
    sent = list(range(len(chunk.inputs)))
    inputs = chunk.inputs
    if problems:
        sent = [row for row in sent if row not in problems]
        inputs = [inputs[row] for row in sent]
    results = await work.run(inputs)
    for place, reason in results.refused.items():
        rejected.append(Rejection(chunk.rows[sent[place]], reason, chunk.id_of(sent[place])))
    rejected.sort(key=lambda rejection: rejection.row)
    if not results.refused:
        return _Served(chunk, results, sent, list(range(len(sent))), rejected)
    answered = [place for place in range(len(sent)) if place not in results.refused]
    return _Served(chunk, results, [sent[place] for place in answered], answered, rejected)


async def _write(served: _Served, writer: Writer) -> None:
    await _output(lambda: writer.add(served.chunk, served.kept, served.results, served.answered))


def _commit(
    fragment: Fragment, store: Store, writer: Writer, last: _Served | None, receipt: Receipt, rejected: bytes
) -> Receipt:
    if last is not None:
        writer.add(last.chunk, last.kept, last.results, last.answered)
    reached("rows written")
    receipt = replace(receipt, rows=writer.pending_rows)
    known = {name: value for name, value in asdict(receipt).items() if name not in {"size", "sha256", "won"}}
    sha256 = writer.close({METADATA_KEY: json.dumps(known), "source": fragment.file.url})
    size = writer.path.stat().st_size
    reached("temporary file complete")
    if receipt.rejected_file:
        store.create(f"{REJECTED}/{receipt.rejected_file}", rejected)
    reached("rejected rows committed")
    won = store.commit(writer.path, fragment.name)
    reached("data committed")
    receipt = replace(receipt, size=size, sha256=sha256, won=won)
    if won:
        store.put(receipt.name, receipt.dump())
    reached("receipt written")
    return receipt


async def _output(work: Callable[[], R]) -> R:
    """Run blocking work on the output in a thread.

    Raises OutputFailed where every fragment would fail alike, and OSError for what may pass.
    """
    # A thread cannot be cancelled: who is goes when it has ended, so that nobody closes the file beneath it.
    try:
        return await uninterrupted(in_daemon_thread(work, "write output"))
    except OSError as error:
        if not isinstance(error, PermissionError) and error.errno not in _LASTING:
            raise
        problem = f"the output cannot be written: {error}"
    raise OutputFailed(f"{problem}; what was committed is kept: correct this and run the same command again")
