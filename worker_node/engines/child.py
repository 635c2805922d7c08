"""The engine process: one thread, one pipeline, one loop.

    python -m worker_node.engines.child LINK PARENT_PID

`LINK` is for `link_to_parent`. The first frame is the `EngineSpec`; then commands come in and events go out
until the edge process closes the link, dies (this process then ends too) or says `Shutdown`."""

from __future__ import annotations

import importlib
import logging
import select
import signal
import sys
import time
import traceback

import msgspec

from worker_node.core.operating_system import link_to_parent, lower_priority
from worker_node.engines.protocol import (
    Broken,
    Cancel,
    DeviceBroken,
    EngineSpec,
    Event,
    Failed,
    Heartbeat,
    LoadFailed,
    NativeCall,
    Outcome,
    Runner,
    Shutdown,
    Submit,
    results_of,
)
from worker_node.engines.wire import COMMANDS, SPECS, ChildChannel, decode

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0


class EdgeGone(Exception):
    """The edge process closed the channel or asked this process to end."""


def make_runner(spec: EngineSpec) -> Runner:
    # By name, so that an engine process imports only the runtime that it needs.
    module, name = spec.runner.rsplit(":", 1)
    runner: Runner = getattr(importlib.import_module(module), name)(spec)
    return runner


class Loop:
    """Drain the inbox, step, emit; and send a heartbeat once a second."""

    def __init__(self, channel: ChildChannel, runner: Runner) -> None:
        self._channel = channel
        self._runner = runner
        self._jobs = msgspec.msgpack.Decoder(runner.jobs)
        self._beat_at = 0.0
        self._announced = False
        # The stages of the native calls so far.
        self._called: set[str] = set()

    def run(self) -> None:
        waiting_for = [self._channel.fileno()]
        if self._runner.wake_fd is not None:
            waiting_for.append(self._runner.wake_fd)
        while True:
            if not self._runner.has_work:
                self._channel.flush()
                select.select(waiting_for, [], [], HEARTBEAT_S)
            self.poll()
            self._runner.step(self._emit, self.poll)
            if self._announced:
                self._beat_at = 0.0  # the call has returned and nothing came of it that would tell so
            self.beat(idle=not self._runner.has_work)

    def _emit(self, event: Event | Outcome) -> None:
        self._announced = isinstance(event, NativeCall)
        if isinstance(event, Outcome):
            self._channel.send(results_of(event), later=event.followed)
            return
        if isinstance(event, NativeCall) and event.stage not in self._called:
            self._called.add(event.stage)
            event = msgspec.structs.replace(event, first=True)
        self._channel.send(event)

    def poll(self) -> None:
        """Handle every command that has arrived, without waiting; runners also call it between tokens."""
        try:
            frames = self._channel.receive(wait=False)
        except (EOFError, ConnectionError) as error:
            raise EdgeGone from error
        if frames:
            # They may change what follows.
            self._channel.flush()
        for frame in frames:
            command = decode(COMMANDS, frame)
            if isinstance(command, Shutdown):
                raise EdgeGone
            if isinstance(command, Cancel):
                self._runner.cancel(command.id)
            else:
                self._submit(command)
        self.beat()

    def _submit(self, command: Submit) -> None:
        try:
            job = self._jobs.decode(command.body)
        except msgspec.MsgspecError as error:
            self._emit(Failed(command.id, "internal_error", f"the engine cannot read the job: {error}"))
            return
        self._runner.submit(job)

    def beat(self, *, idle: bool = False) -> None:
        """Send a heartbeat if one is due. `idle`: no job is queued or in a call; there may be runs beside the loop."""
        now = time.monotonic()
        if now >= self._beat_at:
            self._beat_at = now + HEARTBEAT_S
            stats = self._runner.stats()
            self._emit(Heartbeat(stats, idle and stats.oldest_run is None))


def main(link: int, parent_pid: int) -> int:
    sock = link_to_parent(link, parent_pid)
    # The edge process decides when an engine ends; a Ctrl-C in its terminal reaches us too and must not.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = ChildChannel(sock)
    try:
        spec = decode(SPECS, channel.receive(wait=True)[0])
    except (EOFError, ConnectionError):
        return 0
    lower_priority(spec.nice)
    try:
        runner = make_runner(spec)
        loaded = runner.load()
        if (openvino := sys.modules.get("openvino")) is not None:
            loaded = msgspec.structs.replace(loaded, openvino=openvino.get_version())
        channel.send(loaded)
    except Exception as error:  # noqa: BLE001  (whatever a driver raises, it is reported to the edge)
        # Of an error of ours the message says all; of another's it may not.
        said = " | ".join(line.strip() for line in str(error).splitlines() if line.strip())[:500]
        ours = type(error).__module__.startswith("worker_node.")
        channel.send(LoadFailed(said if ours else f"{type(error).__name__}: {said}"))
        return 1
    try:
        Loop(channel, runner).run()
    except (EdgeGone, BrokenPipeError, ConnectionError):
        runner.close()
    except DeviceBroken as error:
        channel.send(Broken(str(error)))
        return 1
    except Exception as error:  # noqa: BLE001  (whatever a runtime raises)
        # Else its end would have an exit status for a reason. The error's message is left out: it may quote a request.
        name, place = type(error).__name__, "".join(traceback.format_tb(error.__traceback__))
        log.error("the engine of %s failed (%s):\n%s", spec.model_id, name, place)
        channel.send(Broken(f"the engine failed by an error of its own ({name}; the log says where)"))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
