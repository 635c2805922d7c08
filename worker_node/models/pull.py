"""A pull in a process of its own, which can be ended at any moment: `python -m worker_node.models.pull ROOT NAME`.

Downloads block in native code and in other people's libraries. Killing the process ends them all, since what it
starts is tethered to it. It writes one JSON line for each step and one at the end."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path

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
from worker_node.core.operating_system import tethered
from worker_node.core.types import Progress
from worker_node.models.convert.job import Ended, follow, report
from worker_node.models.store import ModelStore

# Errors of a pull that tell the caller more than that it failed.
_KINDS: dict[str | None, type[NodeError]] = {
    kind.__name__: kind for kind in (BadRequest, ConversionFailed, HashMismatch, ModelNotFound, SourceRejected)
}


async def pull(root: Path, name: str, progress: Progress) -> None:
    """Install the model that `name` stands for, see `ModelStore.pull_spec`. Cancelling kills everything it started.

    Raises the NodeError that the pull ended with.
    """
    process = await asyncio.create_subprocess_exec(
        *tethered([sys.executable, "-m", __name__, str(root), name]),
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
            ended = follow(line, progress) or ended
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


if __name__ == "__main__":
    sys.exit(report(lambda progress: ModelStore(Path(sys.argv[1])).pull(sys.argv[2], progress), sys.stdout.buffer))
