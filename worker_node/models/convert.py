"""Runs a conversion in a process of its own and waits for it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import msgspec

from worker_node.core.environment import native_environment
from worker_node.core.errors import ConversionFailed
from worker_node.models.conversion.job import ConversionGivenUp, ConversionJob, ConversionStage, Done, Message
from worker_node.models.progress import Progress
from worker_node.models.tether import tethered

_LOG_TAIL = 800

_MODULE = "worker_node.models.conversion"


def convert(job: ConversionJob, progress: Progress) -> None:
    """Make the model directory that the job describes.

    Raises ConversionFailed when the files cannot be converted, the packages for it are missing, or the
    process dies.
    """
    log = Path(job.scratch) / "conversion.log"
    with (
        log.open("wb") as errors,
        subprocess.Popen(  # noqa: S603 (our own program)
            tethered([sys.executable, "-m", _MODULE]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**native_environment(), "TMPDIR": job.scratch},
        ) as process,
    ):
        try:
            last = _follow(process, job, progress)
        except BaseException:
            process.kill()
            raise
    match last:
        case ConversionGivenUp(message):
            raise ConversionFailed(message)
        case Done() if process.returncode == 0:
            return
    tail = log.read_text(errors="replace")[-_LOG_TAIL:].strip()
    raise ConversionFailed(
        f"{job.id}: the conversion process {_ending(process.returncode)}: {tail or 'it said nothing'}"
    )


def _follow(process: subprocess.Popen[bytes], job: ConversionJob, progress: Progress) -> Message | None:
    stdin, stdout = _pipe(process.stdin), _pipe(process.stdout)
    try:
        stdin.write(msgspec.json.encode(job))
        stdin.close()
    except BrokenPipeError:
        pass  # it died before it read its job; how is told below
    last: Message | None = None
    decoder = msgspec.json.Decoder(Message)
    for line in stdout:
        last = decoder.decode(line)
        if isinstance(last, ConversionStage):
            progress.stage(last.name)
    return last


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    if stream is None:
        raise AssertionError("the process was started with pipes")
    return stream


def _ending(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"
