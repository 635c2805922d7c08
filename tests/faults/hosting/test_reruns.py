"""What becomes of requests whose engine dies: run again, or refused when they are to blame. Scripted engines in real
processes, and the serving path above them without its tokenizer."""

import asyncio
import os
import signal
import tempfile
import time
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.hosting.test_engine_faults import HANG_S, QUICK, RUNNER, no_canary, until
from tests.support.scripted_runner import BREAK, EATER, HANG, POISON
from worker_node.devices.memory import KERNEL, MemoryReader
from worker_node.domain import Device, ModelKind, RequestContext
from worker_node.engines.base import EngineState
from worker_node.engines.messages import EngineSpec
from worker_node.errors import DeadlineExceeded, EngineDied, EngineUnavailable, RequestBreaksEngine
from worker_node.hosting.life import HostingLimits
from worker_node.hosting.liveness import LivenessLimits
from worker_node.hosting.restart import RestartLimits
from worker_node.hosting.supervisor import SupervisedEngine
from worker_node.hosting.suspicion import Suspects
from worker_node.manager.placement import Placement
from worker_node.scheduling.admission import Admission, AdmissionLimits
from worker_node.serving import rerun
from worker_node.serving.places import select_placement
from worker_node.serving.rerun import MAX_RUNS, Runs, run_again
from worker_node.serving.verdict import Demand
from worker_node.tasks.embed.calls import EmbeddingOutput
from worker_node.tasks.embed.messages import Embedded, embed_job
from worker_node.tasks.generate.messages import GenerateJob, TokenDelta

LIMITS = HostingLimits(restart=QUICK, stop_timeout_s=1.0)


class Model:
    """A model with a scripted engine on each device."""

    def __init__(self, devices, limits, options, canary=no_canary, memory=KERNEL):
        suspects = Suspects()
        self._hold = Path(options.get("hold", os.devnull))
        self.engines = [
            SupervisedEngine(
                EngineSpec("m", ModelKind.GENERATION, "/", device, RUNNER, options),
                canary,
                limits,
                suspects=suspects,
                memory=memory,
            )
            for device in devices
        ]
        self.placements = [
            Placement(device, engine, Admission("m", AdmissionLimits(64, 64)), 8192, 8192, suspects=suspects)
            for device, engine in zip(devices, self.engines, strict=True)
        ]

    async def runs(self, seconds, **more):
        now = time.monotonic()
        context = RequestContext("req_1", now, now + seconds, **more)
        demand = Demand("m", self.placements, 8, 8, 1)
        place = await select_placement(demand, context)
        return Runs(demand, context, place, lambda p: p.admission.permit(1, context.deadline)), context

    async def answer(self, *tokens, seconds=60.0, on_first=None, head=False, **more):
        """The tokens and the device of the answer to a prompt of these tokens; `more`: fields of `RequestContext`."""
        runs, context = await self.runs(seconds, **more)
        if head:
            runs.tell_device()
        job = GenerateJob(0, embed_job([tokens], 0.0).tokens, 100, context.deadline)
        got = []
        with runs.admitted() as runs.permit:
            async with aclosing(run_again(runs, lambda _place: job, TokenDelta)) as deltas:
                async for delta in deltas:
                    if not got and on_first:
                        on_first()
                    got += delta.tokens
        return got, runs.place.placement.device

    async def embed(self, *rows, seconds=60.0):
        runs, context = await self.runs(seconds)
        with runs.admitted() as runs.permit:
            job = embed_job(rows, context.deadline)
            async with aclosing(run_again(runs, lambda _place: job, Embedded)) as results:
                return EmbeddingOutput.of(await anext(results), len(rows))

    def let_go(self):
        """Held engines take a step."""
        self._hold.unlink()

    async def kill(self, index=0, *, holding=1, number=signal.SIGKILL, let_go=True):
        """Kill an engine as soon as it holds so many jobs; those that come after it are not held."""
        engine = self.engines[index]
        async with asyncio.timeout(30):
            while engine.status.in_flight < holding or engine.status.state is not EngineState.READY:
                await asyncio.sleep(0.002)
        os.kill(engine.status.pid, number)
        if let_go:
            self.let_go()


@asynccontextmanager
async def serving(*devices, limits=LIMITS, canary=no_canary, memory=KERNEL, **options):
    """Yields a `Model`, all of whose engines are ready; `options` are the runner's."""
    model = Model(devices or (Device.CPU,), limits, options, canary, memory)
    for engine in model.engines:
        engine.start()
    try:
        for engine in model.engines:
            await until(engine, EngineState.READY)
        yield model
    finally:
        await asyncio.gather(*(engine.stop() for engine in model.engines))


@asynccontextmanager
async def holding(*devices, **how):
    """As `serving`, with engines that take no step until `Model.kill` or `Model.let_go`."""
    with tempfile.TemporaryDirectory() as directory:
        hold = Path(directory) / "hold"
        hold.touch()
        async with serving(*devices, hold=str(hold), **how) as model:
            yield model


async def test_a_call_whose_engine_dies_before_the_first_token_is_answered_by_the_restarted_engine():
    async with holding(announce=True) as model:
        answers = [asyncio.create_task(model.answer(n, n + 1)) for n in range(1, 4)]
        await model.kill(holding=3)
        assert await asyncio.gather(*answers) == [([n, n + 1], Device.CPU) for n in range(1, 4)]
        assert model.engines[0].status.restarts == 1
        # They are clear of suspicion: from now on they share the engine again.
        assert not model.placements[0].suspects


async def test_calls_that_come_while_the_engine_is_started_again_are_answered_too():
    async with holding(load_s=0.3) as model:
        first = asyncio.create_task(model.answer(1, 2))
        await model.kill()
        await until(model.engines[0], EngineState.BACKING_OFF, EngineState.STARTING)
        during = [asyncio.create_task(model.answer(n, n + 1)) for n in range(3, 6)]
        assert await asyncio.gather(first, *during) == [([n, n + 1], Device.CPU) for n in (1, 3, 4, 5)]
        assert model.placements[0].admission.outstanding == 0


async def test_a_call_whose_caller_reads_the_counter_is_not_run_again():
    async with holding() as model:
        answer = asyncio.create_task(model.answer(1, 2, own_proof=True))
        await model.kill()
        with pytest.raises(EngineDied):
            await answer


@pytest.mark.parametrize("announce", [True, False], ids=["calls are announced", "they are not"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_what_was_on_board_of_a_killed_engine_is_run_again_together(tmp_path, announce, number):
    log = tmp_path / "log"
    async with holding(log=str(log), announce=announce, prefill_s=0.3) as model:
        answers = [asyncio.create_task(model.answer(n, n + 1)) for n in range(1, 41)]
        embeddings = [asyncio.create_task(model.embed([n], [n, n])) for n in range(1, 21)]
        await model.kill(holding=60, number=number)
        while log.read_text().count("load") != 2:
            await asyncio.sleep(0.002)
        assert not model.placements[0].suspects, "none of them is suspected"
        assert await asyncio.gather(*answers) == [([n, n + 1], Device.CPU) for n in range(1, 41)]
        assert [output.vectors.shape[0] for output in await asyncio.gather(*embeddings)] == [2] * 20
        assert model.engines[0].status.restarts == 1
        # Tried one after another they would take a step for each.
        assert len([line for line in log.read_text().splitlines() if line.startswith("step")]) < 20


@pytest.mark.parametrize("sign", ["the kernel counts it", "it grew", "nothing was left"])
async def test_a_request_for_which_the_kernel_kills_the_engine_is_refused(sign, monkeypatch):
    # An idle engine is looked at every 5 s: the request here is shorter.
    monkeypatch.setattr("worker_node.hosting.liveness._IDLE_LOOK_S", 0.3)
    kills, own, left = iter(range(1000)), 0, 1 << 40

    def oom_kills():
        return next(kills) if sign == "the kernel counts it" else 0

    def grown(_pid):
        nonlocal own
        own += (1 << 30) if sign == "it grew" else 0
        return own

    if sign == "nothing was left":
        left = 0
    memory = MemoryReader(grown, lambda: left, oom_kills)
    async with serving(memory=memory, prefill_s=2.0 if sign == "it grew" else 0) as model:
        async with asyncio.timeout(60):
            with pytest.raises(RequestBreaksEngine):
                await model.answer(EATER)


async def test_embeddings_are_run_again_too():
    async with holding() as model:
        outputs = [asyncio.create_task(model.embed([n], [n, n])) for n in range(1, 4)]
        await model.kill(holding=3)
        assert [output.vectors.shape[0] for output in await asyncio.gather(*outputs)] == [2, 2, 2]


async def test_it_is_run_on_the_next_placement_if_that_is_up():
    slow = HostingLimits(restart=RestartLimits(first_backoff_s=30.0), stop_timeout_s=1.0)
    async with holding(Device.NPU, Device.CPU, limits=slow) as model:
        answer = asyncio.create_task(model.answer(1, 2))
        await model.kill()
        assert await answer == ([1, 2], Device.CPU)


async def test_a_stream_whose_head_named_the_device_stays_on_it():
    async with holding(Device.NPU, Device.CPU) as model:
        answer = asyncio.create_task(model.answer(1, 2, head=True))
        await model.kill()
        assert await answer == ([1, 2], Device.NPU)


async def test_after_the_first_token_nothing_is_run_again():
    async with serving(step_s=0.01) as model:
        with pytest.raises(EngineDied):
            await model.answer(*range(1, 300), on_first=lambda: os.kill(model.engines[0].status.pid, signal.SIGKILL))


async def test_a_deadline_that_the_restart_would_outlast_ends_the_call():
    slow = HostingLimits(restart=RestartLimits(first_backoff_s=30.0), stop_timeout_s=1.0)
    async with holding(limits=slow) as model:
        answer = asyncio.create_task(model.answer(1, 2, seconds=20.0))
        await model.kill()
        async with asyncio.timeout(15):
            with pytest.raises(EngineDied) as caught:
                await answer
        assert caught.value.retry_after is not None


async def test_a_deadline_that_passes_during_the_restart_ends_the_call(tmp_path):
    order = tmp_path / "order"
    order.write_text("go")
    async with holding(on_load=str(order)) as model:
        order.write_text("wait")
        answer = asyncio.create_task(model.answer(1, 2, seconds=2.0))
        await model.kill()
        with pytest.raises(DeadlineExceeded):
            await answer


@pytest.mark.parametrize("end", ["cancelled", "stopped"])
async def test_a_call_that_waits_for_a_restart_ends_when_its_caller_leaves_or_the_node_stops(end):
    slow = HostingLimits(restart=RestartLimits(first_backoff_s=30.0), stop_timeout_s=1.0)
    async with holding(limits=slow) as model:
        answer = asyncio.create_task(model.answer(1, 2))
        await model.kill()
        await until(model.engines[0], EngineState.BACKING_OFF)
        before = len(asyncio.all_tasks())
        if end == "cancelled":
            answer.cancel()
        else:
            await model.engines[0].stop()
        async with asyncio.timeout(30):
            with pytest.raises(asyncio.CancelledError if end == "cancelled" else EngineUnavailable):
                await answer
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) < before, "nothing waits any more"


async def test_a_request_whose_engines_keep_dying_is_given_up_after_the_most_runs(monkeypatch):
    monkeypatch.setattr(rerun, "MAX_RUNS", 4)
    async with holding() as model:
        # Another request is on board each time, so that nothing tells which of them is to blame.
        answers = [asyncio.create_task(model.answer(n, n)) for n in (1, 2)]

        async def kill_for_ever():
            while True:
                await model.kill(let_go=False)
                await asyncio.sleep(0.05)

        killer = asyncio.create_task(kill_for_ever())
        async with asyncio.timeout(60):
            results = await asyncio.gather(*answers, return_exceptions=True)
        killer.cancel()
        assert all(isinstance(result, EngineUnavailable | RequestBreaksEngine) for result in results), results
        assert model.engines[0].status.restarts <= 2 * 4


@pytest.mark.parametrize("announce", [True, False], ids=["calls are announced", "they are not"])
async def test_the_request_that_kills_the_engine_is_found_and_refused_and_the_others_are_answered(tmp_path, announce):
    log = tmp_path / "log"
    # Over 5 s: eight trials of 0.6 s, and five restarts.
    async with holding(log=str(log), announce=announce, prefill_s=0.6) as model:
        # While the engine is at work on this one the others arrive, so that it takes them all up in one step.
        before = asyncio.create_task(model.answer(9))
        while "submit" not in log.read_text():
            await asyncio.sleep(0)
        innocent = [asyncio.create_task(model.answer(n, n + 1)) for n in range(1, 41)]
        poisonous = asyncio.create_task(model.answer(POISON, 1))
        async with asyncio.timeout(60):
            while model.engines[0].status.in_flight < 42:
                await asyncio.sleep(0)
            model.let_go()
            with pytest.raises(RequestBreaksEngine):
                await poisonous
            assert await asyncio.gather(*innocent) == [([n, n + 1], Device.CPU) for n in range(1, 41)]
        assert await before == ([9], Device.CPU)
        deaths = [int(line.split()[-1]) for line in log.read_text().splitlines() if line.startswith("die with")]
        assert len(deaths) <= MAX_RUNS
        assert sum(on_board > 1 for on_board in deaths) <= 3, "the others were taken down again more than twice"
        assert deaths[-2:] == [1, 1], "it was not alone when it was found guilty"
        # The request is to blame and not the engine; sent again it costs nothing.
        await until(model.engines[0], EngineState.READY)
        with pytest.raises(RequestBreaksEngine):
            await model.answer(POISON, 1)
        assert model.engines[0].status.restarts == len(deaths)


async def test_a_request_that_hangs_its_engine_twice_is_refused():
    limits = HostingLimits(liveness=LivenessLimits(HANG_S, HANG_S), restart=QUICK, stop_timeout_s=1.0)
    async with serving(limits=limits) as model:
        # More than 5 s: it hangs twice.
        async with asyncio.timeout(60):
            with pytest.raises(RequestBreaksEngine, match="hung"):
                await model.answer(HANG)
        await until(model.engines[0], EngineState.READY)
        assert model.engines[0].status.restarts == 2


async def test_a_request_whose_preparation_kills_the_engine_is_refused_at_once_and_the_others_run_again():
    async with serving(step_s=0.05) as model:
        innocent = [asyncio.create_task(model.answer(n, n + 1)) for n in range(1, 4)]
        with pytest.raises(RequestBreaksEngine):
            await model.answer(BREAK)
        await asyncio.gather(*innocent, return_exceptions=True)
        assert model.engines[0].status.restarts == 1


async def test_what_an_engine_announced_counts_though_a_write_to_it_fails_first():
    """Else the request that was sent to a dead engine is suspected beside the one that killed it."""
    async with serving() as model:
        engine = model.engines[0]
        guilty = asyncio.create_task(model.answer(BREAK))
        async with asyncio.timeout(30):
            while not engine.status.in_flight:
                await asyncio.sleep(0)
        # The event loop stands still until the engine is dead: it has read nothing when it writes again.
        os.waitid(os.P_PID, engine.status.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222
        innocent = asyncio.create_task(model.answer(1, 2))
        with pytest.raises(RequestBreaksEngine):
            await guilty
        assert await innocent == ([1, 2], Device.CPU)
        assert engine.status.restarts == 1


async def test_an_engine_that_dies_with_every_request_is_quarantined_and_no_request_stays_accused():
    # How many requests that takes is simulated in tests/unit/worker_node/hosting/test_trials_simulation.py.
    limits = HostingLimits(restart=replace(QUICK, crash_limit=1), stop_timeout_s=1.0)
    async with serving(limits=limits) as model:
        with pytest.raises(EngineUnavailable):
            await model.answer(POISON)
        await until(model.engines[0], EngineState.QUARANTINED)
        assert not model.placements[0].suspects


async def test_requests_that_break_an_engine_do_not_quarantine_it_while_it_answers_others():
    async with serving() as model:
        for n in range(3):
            await until(model.engines[0], EngineState.READY)
            with pytest.raises(RequestBreaksEngine):
                await model.answer(POISON, n)
            await until(model.engines[0], EngineState.READY)
            assert await model.answer(n, n) == ([n, n], Device.CPU)
        assert model.engines[0].status.restarts == 6
