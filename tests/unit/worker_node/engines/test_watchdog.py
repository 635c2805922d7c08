"""When the watchdog acts, over a clock that jumps from one timer to the next: no time passes, and none is guessed."""

import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.jumping import JumpingLoop
from worker_node.engines import process
from worker_node.engines.cpu_share import ALONE
from worker_node.engines.process import End, EngineLife, HostingLimits, KillWatch
from worker_node.engines.protocol import EngineStats, Loaded
from worker_node.engines.watchdog import CallTimes, Liveness, LivenessLimits

SPEC = SimpleNamespace(model_id="m", device="CPU")


class Link:
    """An engine process that is heard of when the test says so, and dies when it is killed."""

    pid = 1
    up = True
    in_flight = 1
    stats = EngineStats()

    def __init__(self, loop, limits):
        self._loop = loop
        self.liveness = Liveness(limits, CallTimes(), loop.time())
        self.kills = KillWatch()
        self.seat = ALONE.seat()
        self.loaded = loop.create_future()
        self.loaded.set_result(Loaded(0.0, "scripted", "0"))
        self._closed = loop.create_future()
        self.killed_at = None

    def begin(self):
        pass

    def hear_at(self, when):
        self._loop.call_at(when, self._hear)

    def _hear(self):
        self.liveness.heard(self._loop.time())

    def kill_hung(self, reason):
        self.killed_at = self._loop.time()
        self._closed.set_result(reason)

    async def wait_closed(self):
        return await asyncio.shield(self._closed)


async def _nothing(_loaded):
    pass


async def _live(limits, pauses):
    """Live until the watchdog's end, hearing the engine after each of the pauses; return link, last word, outcome."""
    loop = asyncio.get_running_loop()
    link = Link(loop, limits.liveness)
    when = loop.time()
    for pause in pauses:
        when += pause
        link.hear_at(when)
    outcome = await EngineLife(SPEC, limits, _nothing, lambda: None).run(link)
    return link, when, outcome


@pytest.fixture(autouse=True)
def _time_of_the_loop(monkeypatch):
    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time()))


@given(
    watchdog_s=st.sampled_from([0.5, 2.5, 30.0]),
    pauses=st.lists(st.floats(0.01, 0.95), max_size=20),
)
def test_an_engine_is_killed_when_it_was_silent_for_the_watchdogs_time_and_not_before(watchdog_s, pauses):
    limits = HostingLimits(liveness=LivenessLimits(watchdog_s))
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        link, last_heard, outcome = runner.run(_live(limits, [pause * watchdog_s for pause in pauses]))
    # Exactly then: the watchdog's next look is never later than the moment at which the time is up.
    assert link.killed_at == pytest.approx(last_heard + watchdog_s)
    assert outcome == (End.CRASHED, f"hung: no heartbeat for {watchdog_s:.0f} s")


def test_a_watchdog_that_fails_looks_again(caplog):
    class Broken(Link):
        """The first look at it fails by an error that nobody foresaw."""

        def __init__(self, loop, limits):
            super().__init__(loop, limits)
            sound, looks = self.liveness, iter([True])

            def look(now):
                if next(looks, False):
                    raise ZeroDivisionError("what a request holds")
                return sound.look(now)

            self.liveness = SimpleNamespace(look=look)

    async def live():
        limits = HostingLimits(liveness=LivenessLimits(5.0))
        link = Broken(asyncio.get_running_loop(), limits.liveness)
        return await EngineLife(SPEC, limits, _nothing, lambda: None).run(link)

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        assert runner.run(live()) == (End.CRASHED, "hung: no heartbeat for 5 s")
    assert "watching m on CPU failed: ZeroDivisionError" in caplog.text
    assert "request" not in caplog.text
