"""A pull in a process of its own, which can be ended at any moment: `python -m worker_node.models.pull ROOT NAME`.

Downloads block in native code and in other people's libraries. Killing the process ends them all, since what it starts
is tethered to it. It writes one JSON line for each step and one at the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path
from typing import ClassVar

import msgspec

from worker_node.core.environment import tool_environment
from worker_node.core.errors import (
    BadRequest,
    ConversionFailed,
    DownloadFailed,
    HashMismatch,
    ModelNotFound,
    NodeError,
    SourceRejected,
)
from worker_node.core.operating_system import end_with_parent
from worker_node.core.types import Progress
from worker_node.models.prepare import Wish
from worker_node.models.sources.disk import storage_problem
from worker_node.models.sources.downloads import check_hash_given
from worker_node.models.sources.reference import LocalReference, UrlReference
from worker_node.models.store import ModelStore


class Stage(msgspec.Struct, tag="stage"):
    """A new stage begins; see `Progress.stage`."""

    name: str
    total: int | None


class Update(msgspec.Struct, tag="update"):
    """See `Progress.update`."""

    done: int


class Ended(msgspec.Struct, tag="ended"):
    """The pull is over; `problem` is why it failed and `kind` the name of its error, None if it did not."""

    problem: str | None
    kind: str | None = None


# Those that a pull may end with and that tell the caller more than that it failed.
_KINDS: dict[str | None, type[NodeError]] = {
    kind.__name__: kind for kind in (BadRequest, ConversionFailed, HashMismatch, ModelNotFound, SourceRejected)
}

_DECODER = msgspec.json.Decoder(Stage | Update | Ended)


def requested(store: ModelStore, name: str) -> Wish:
    """What a request to pull `name` asks for, checked without network calls.

    Raises ModelNotFound or BadRequest: nothing stands for the name, a local path that is relative (to what?), a URL
    without its hash.
    """
    wish = store.wish(name)
    reference = wish.reference
    if isinstance(reference, LocalReference) and not reference.path.is_absolute():
        raise BadRequest(f"{name[:200]!r}: the node takes local files only by their absolute path", param="model")
    if isinstance(reference, UrlReference):
        check_hash_given(reference, insecure_no_hash=False)
    return wish


async def pull(root: Path, name: str, progress: Progress) -> None:
    """Install the model that `name` stands for, see `ModelStore.wish`. When this is cancelled, everything that it
    started is killed.

    Raises the NodeError that the pull ended with.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __name__, str(os.getpid()), str(root), name),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        env=tool_environment(),
        # Ctrl-C in the terminal is for the process that waits for this one.
        start_new_session=True,
    )
    ended: Ended | None = None
    try:
        assert process.stdout is not None  # noqa: S101  (it was asked for)
        async for line in process.stdout:
            message = _DECODER.decode(line)
            if isinstance(message, Stage):
                progress.stage(message.name, message.total)
            elif isinstance(message, Update):
                progress.update(message.done)
            else:
                ended = message
        await process.wait()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if ended is None:
        raise DownloadFailed(
            f"pulling {name} ended with status {process.returncode}; what it wrote to standard error has the rest"
        )
    if ended.problem is not None:
        raise _KINDS.get(ended.kind, DownloadFailed)(ended.problem)


class _Lines:
    """Progress as lines on standard output."""

    encode: ClassVar = msgspec.json.Encoder().encode

    def stage(self, name: str, total: int | None = None) -> None:
        """See `Progress.stage`."""
        self.write(Stage(name, total))

    def update(self, done: int) -> None:
        """See `Progress.update`."""
        self.write(Update(done))

    def write(self, message: Stage | Update | Ended) -> None:
        """Write one line, at once."""
        sys.stdout.buffer.write(self.encode(message) + b"\n")
        sys.stdout.buffer.flush()


def main(parent: int, root: Path, name: str) -> None:
    """Pull, and say how it ended."""
    end_with_parent(parent)
    lines = _Lines()
    try:
        ModelStore(root).pull(name, lines)
    except NodeError as error:
        lines.write(Ended(error.message, type(error).__name__))
    except OSError as error:
        lines.write(Ended(storage_problem(error) or str(error)))
    else:
        lines.write(Ended(None))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
