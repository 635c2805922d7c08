"""When the watchdog acts, over a clock that jumps from one timer to the next: no time passes, and none is guessed."""

import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.jumping import JumpingLoop
from worker_node.engines import process
from worker_node.engines.isolation import Suspects
from worker_node.engines.process import EngineProcess, HostingLimits
from worker_node.engines.watchdog import CallTimes, KillWatch, LivenessLimits

SPEC = SimpleNamespace(model_id="m", device="CPU")


class Process(EngineProcess):
    """An engine process that is heard of when the test says so, and whose end by the watchdog is recorded."""

    pid = 1

    def __init__(self, watchdog_s):
        limits = HostingLimits(liveness=LivenessLimits(watchdog_s))
        super().__init__(SPEC, limits, Suspects(), KillWatch(), CallTimes())
        self.killed = None

    def hear_at(self, when):
        loop = asyncio.get_running_loop()
        loop.call_at(when, lambda: self._liveness.heard(loop.time()))

    def kill_hung(self, reason):
        self.killed = asyncio.get_running_loop().time(), reason


async def _live(watchdog_s, pauses):
    """Live until the watchdog's end, heard after each of the pauses; return when it was heard last, and its end."""
    process = Process(watchdog_s)
    when = asyncio.get_running_loop().time()
    for pause in pauses:
        when += pause
        process.hear_at(when)
    await process.watch()
    return when, process.killed


@pytest.fixture(autouse=True)
def _time_of_the_loop(monkeypatch):
    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time()))


@given(
    watchdog_s=st.sampled_from([0.5, 2.5, 30.0]),
    pauses=st.lists(st.floats(0.01, 0.95), max_size=20),
)
def test_an_engine_is_killed_when_it_was_silent_for_the_watchdogs_time_and_not_before(watchdog_s, pauses):
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        last_heard, (killed_at, reason) = runner.run(_live(watchdog_s, [pause * watchdog_s for pause in pauses]))
    # Exactly then: the watchdog's next look is never later than the moment at which the time is up.
    assert killed_at == pytest.approx(last_heard + watchdog_s)
    assert reason == f"hung: no heartbeat for {watchdog_s:.0f} s"


def test_a_watchdog_that_fails_looks_again(caplog):
    async def live():
        process = Process(5.0)
        sound, looks = process._liveness, iter([True])

        def look(now):
            if next(looks, False):
                raise ZeroDivisionError("what a request holds")
            return sound.look(now)

        process._liveness = SimpleNamespace(look=look)
        await process.watch()
        return process.killed[1]

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        assert runner.run(live()) == "hung: no heartbeat for 5 s"
    assert "watching m on CPU failed: ZeroDivisionError" in caplog.text
    assert "request" not in caplog.text
