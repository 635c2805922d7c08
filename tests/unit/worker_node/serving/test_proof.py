"""A request that requires the NPU gets an answer only with proof that the NPU worked for it."""

import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.services import services_of
from tests.support.task_engine import TaskEngine, encoded
from worker_node.core.errors import EngineDied, NpuNotProven
from worker_node.core.types import Busy, Device, ModelKind, RequestContext
from worker_node.engines.protocol import EngineState, EngineStatus
from worker_node.manager.placement import Placement
from worker_node.scheduling.admission import Admission, AdmissionLimits
from worker_node.tasks.embed.service import EmbeddingCache, EmbeddingModel, embed
from worker_node.tasks.generate.blocks import Finished
from worker_node.tasks.generate.building import GenerationModel
from worker_node.tasks.generate.messages import Sampling, TokenDelta
from worker_node.tasks.generate.request import GenerationRequest, TokenIds
from worker_node.tasks.generate.service import generate


class Tokenizer:
    """One token is one letter."""

    async def encode(self, texts, *, truncate, deadline):
        return [list(text) for text in texts]

    def check_ids(self, ids):
        return list(ids)

    byte_table = tuple(bytes([code]) for code in range(128))


class Engine(TaskEngine):
    """Its runs take these busy times, one for each token."""

    status = EngineStatus(EngineState.READY)

    def __init__(self, *busy):
        self.busy = busy
        self.runs = 0

    async def embed(self, tokens, *, deadline, interactive):
        self.runs += 1
        return encoded(np.zeros((len(tokens), 1)), busy=Busy(self.busy[-1]))

    async def generate(self, job):
        for index, busy in enumerate(self.busy):
            finish = "stop" if index == len(self.busy) - 1 else None
            yield TokenDelta(1, [ord("a")], finish, busy=Busy(busy))


def registry(engine, *, strict=False, cache=0, device=Device.NPU):
    place = Placement(device, engine, Admission("m", AdmissionLimits(8)), 64, 64)
    installed = {kind: SimpleNamespace(id=kind, kind=kind, family="", aliases=()) for kind in ModelKind}
    models = [
        EmbeddingModel(
            installed[ModelKind.EMBEDDING], Tokenizer(), "space", 1, cache=EmbeddingCache(cache), placements=[place]
        ),
        GenerationModel(installed[ModelKind.GENERATION], Tokenizer(), 64, 1, placements=[place]),
    ]
    return services_of(models, require_proof=strict)


def context(require=Device.NPU):
    now = time.monotonic()
    return RequestContext("req_1", now, now + 60, require_device=require)


def asked(require=Device.NPU, **more):
    return GenerationRequest(replace(context(require), **more), TokenIds((97,)), Sampling())


async def generated(served, request=None, seen=None, **how):
    """The route and the events; `seen` gets the events that came before an error."""
    seen = [] if seen is None else seen
    async with generate(served, request or asked(), **how) as run:
        async for _, events, _ in run.events:
            run.execution.sent = True
            seen += events
        return run.execution.route, seen


async def embedded(served, require=Device.NPU):
    return await embed(served, context(require), ((97,),))


@pytest.mark.parametrize("strict", [False, True])
async def test_a_counter_that_moved_is_proof(strict):
    route, events = await generated(registry(Engine(5, 9), strict=strict))
    assert not route.unproven
    assert isinstance(events[-1], Finished)
    assert not (await embedded(registry(Engine(5), strict=strict))).route.unproven


@pytest.mark.parametrize("strict", [False, True])
async def test_a_counter_that_did_not_move_is_none_and_is_told_before_the_first_byte(strict):
    served = registry(Engine(0, 0), strict=strict)
    began = False
    with pytest.raises(NpuNotProven, match="did not move"):
        async with generate(served, asked()):
            began = True
    assert not began, "the status line would have been sent"
    with pytest.raises(NpuNotProven, match="did not move"):
        await embedded(served)


async def test_a_counter_that_cannot_be_read_passes_with_a_label_or_not_at_all():
    route, events = await generated(registry(Engine(None, None)))
    assert route.unproven
    assert events[-1].busy.us is None
    assert (await embedded(registry(Engine(None)))).route.unproven
    for attempt in (generated, embedded):
        with pytest.raises(NpuNotProven, match="cannot be read"):
            await attempt(registry(Engine(None), strict=True))


async def test_nothing_is_asked_for_where_nothing_is_required():
    for require, device in ((None, Device.NPU), (Device.CPU, Device.CPU)):
        served = registry(Engine(0), strict=True, device=device)
        await generated(served, asked(require))
        await embedded(served, require)


async def test_a_caller_that_reads_the_counter_itself_gets_the_answer():
    """A bounded job tells the whole answer beside the counter that did not move."""
    _, events = await generated(registry(Engine(0, 0)), asked(own_proof=True))
    assert isinstance(events[-1], Finished)


class Recovered(Engine):
    """Its device is recovered in the middle of its first runs; their results arrive together with the announcement."""

    def __init__(self, *busy, runs=1):
        super().__init__(*busy)
        self.recovered_runs = runs

    def interrupted(self):
        if self.runs <= self.recovered_runs:
            self.recoveries += 1

    async def embed(self, tokens, *, deadline, interactive):
        result = await super().embed(tokens, deadline=deadline, interactive=interactive)
        self.interrupted()
        return result

    async def generate(self, job):
        self.runs += 1
        async for delta in super().generate(job):
            yield delta
            if delta.finish is None:
                self.interrupted()


@pytest.mark.parametrize("require", [Device.NPU, None])
async def test_a_result_that_came_with_a_recovery_of_the_npu_is_computed_again(require):
    engine = Recovered(5, 9)
    assert (await embedded(registry(engine), require)).busy.us == 9
    assert engine.runs == 2
    engine = Recovered(5, 9)
    _, [finished] = await generated(registry(engine), asked(require), stream=False)
    assert (engine.runs, finished.busy.us, finished.text()) == (2, 9, "aa")


@pytest.mark.parametrize(
    ("engine", "require", "error"),
    [
        (partial(Engine, 5, None), Device.NPU, NpuNotProven),
        (partial(Recovered, 5, 9), Device.NPU, EngineDied),
        (partial(Recovered, 5, 9), None, EngineDied),
    ],
    ids=["a counter that stops to be readable", "a recovery of the NPU", "a recovery where nothing is required"],
)
async def test_a_stream_without_proof_is_told_at_its_end(engine, require, error):
    seen = []
    with pytest.raises(error):
        await generated(registry(engine(), strict=True), asked(require), seen)
    assert seen
    assert not any(isinstance(event, Finished) for event in seen)


async def test_a_caller_that_reads_the_counter_itself_gets_no_answer_across_a_recovery():
    seen = []
    with pytest.raises(EngineDied, match="recovered"):
        await generated(registry(Recovered(5, 9)), asked(own_proof=True), seen, stream=False)
    assert seen == []


async def test_vectors_of_before_are_no_proof_and_not_kept_over_a_recovery():
    """It is announced a moment after what it aborted: those vectors may have been sent, and must not be kept."""
    engine = Engine(5)
    served = registry(engine, cache=10)
    await embedded(served, None)
    assert (await embedded(served, None)).cached == "hit"
    assert (await embedded(served)).cached is None, "the NPU is required"
    assert engine.runs == 2
    engine.recoveries += 1
    assert (await embedded(served, None)).cached is None
    assert (await embedded(served, None)).cached == "hit"


class Noting(Engine):
    async def generate(self, job):
        self.job = job
        async for delta in super().generate(job):
            yield delta


@pytest.mark.parametrize("stream", [True, False])
async def test_only_the_answer_of_a_stream_may_go_on_after_the_deadline(stream):
    engine, request = Noting(5, 9), asked()
    assert (await generated(registry(engine), request, stream=stream))[1]
    limits = request.context
    assert engine.job.deadline == limits.deadline
    assert engine.job.ends == (limits.ends if stream else limits.deadline) != 0


class Dying(Engine):
    async def embed(self, tokens, *, deadline, interactive):
        self.status = EngineStatus(EngineState.FAILED)
        raise EngineDied("it died before its first vector")

    async def generate(self, job):
        self.status = EngineStatus(EngineState.FAILED)
        raise EngineDied("it died before its first token")
        yield


async def test_vectors_of_a_device_that_took_over_are_not_kept_as_those_of_the_first():
    served = registry(Dying(), cache=10)
    [model] = [model for model in served.manager.models if isinstance(model, EmbeddingModel)]
    cpu = Placement(Device.CPU, Engine(5), Admission("m", AdmissionLimits(8)), 64, 64)
    model.placements = [*model.placements, cpu]
    assert (await embedded(served, None)).route.device is Device.CPU
    model.placements[0].engine = Engine(5)
    reply = await embedded(served, None)
    assert (reply.route.device, reply.cached) == (Device.NPU, None)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_stream_stays_on_the_device_that_its_head_names(stream):
    served = registry(Dying())
    [model] = [model for model in served.manager.models if isinstance(model, GenerationModel)]
    cpu = Placement(Device.CPU, Engine(5), Admission("m", AdmissionLimits(8)), 64, 64)
    model.placements = [*model.placements, cpu]
    async with generate(served, asked(None), stream=stream) as run:
        assert run.execution.route.device is Device.NPU
        if stream:
            with pytest.raises(EngineDied):
                await anext(run.events)
        else:
            await anext(run.events)
            assert run.execution.route.device is Device.CPU


class DyingOnce(Engine):
    """Its first run makes one token and dies; the others answer "bc"."""

    async def generate(self, job):
        self.runs += 1
        if self.runs == 1:
            yield TokenDelta(1, [ord("a")])
            raise EngineDied("it died after its first token")
        yield TokenDelta(1, [ord("b")])
        yield TokenDelta(1, [ord("c")], "stop")


@pytest.mark.parametrize(("stop", "runs"), [(("ax",), 2), ((), 1)], ids=["all is held back", "a letter was sent"])
async def test_a_stream_is_retried_until_the_caller_has_a_part_of_it(stop, runs):
    engine, seen = DyingOnce(), []
    request = GenerationRequest(context(None), TokenIds((97,)), Sampling(stop=stop))
    if runs == 1:
        with pytest.raises(EngineDied):
            await generated(registry(engine), request, seen)
    else:
        _, seen = await generated(registry(engine), request)
        assert seen[-1].text() == "bc"
    assert engine.runs == runs
