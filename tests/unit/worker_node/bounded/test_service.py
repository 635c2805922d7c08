"""A job whose answer copies the example of its prompt runs once more without it."""

import json
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from worker_node.bounded import service as module
from worker_node.bounded.jobs import MEMORY, make_request
from worker_node.bounded.service import REFERENCE_MODEL, Choice, JobService, reservation
from worker_node.core.types import Token
from worker_node.engines.protocol import EngineState
from worker_node.tasks.generate.model import GenerationModel

COPY = json.dumps(MEMORY)
OWN = json.dumps({"candidates": ["Ben wants weekly reports."], "notes": ""})


class Counter:
    """A busy counter that always moves."""

    def __init__(self):
        self.value = 0

    def read(self):
        self.value += 10
        return SimpleNamespace(busy_time_us=SimpleNamespace(value=self.value, reason=None))

    emulated = False


class Lock:
    """A device lock that is always free."""

    @asynccontextmanager
    async def held(self):
        yield


class Engine:
    """A loaded engine."""

    status = SimpleNamespace(state=EngineState.READY, reason=None, load_seconds=1.0, retry_after=None)


class LoadedPlacement:
    """A placement whose engine is loaded."""

    engine, prompt_limit, total_limit = Engine(), 1024, 1088

    async def settled(self, deadline):
        pass


@pytest.fixture
def run(monkeypatch):
    """Run the job with scripted answers; returns the payload and the prompts."""

    async def run(*answers):
        left, prompts = list(answers), []

        @asynccontextmanager
        async def generate(_services, request):
            prompts.append(request.prompt[-1].content)

            async def events():
                yield Token(left.pop(0))

            yield SimpleNamespace(events=events())

        monkeypatch.setattr(module, "generate", generate)
        placement = LoadedPlacement()
        tokenizer = SimpleNamespace(encode_chat=lambda _messages: [1])
        installed = SimpleNamespace(id="scripted")
        model = GenerationModel(installed, [placement], tokenizer)
        services = SimpleNamespace(manager=SimpleNamespace(models=(model,)))
        service = JobService(services, SimpleNamespace(installed=installed), Counter(), Lock(), "/cache", 60, 60)
        result = await service.run(make_request("memory", "Ben wants weekly reports."))
        assert not left
        return result.payload, prompts

    return run


async def test_an_own_answer_is_accepted_at_once(run):
    payload, prompts = await run(OWN)
    assert payload["json"] == json.loads(OWN)
    assert len(prompts) == 1


async def test_a_copy_is_tried_once_more_without_the_example(run):
    payload, prompts = await run(COPY, OWN)
    assert payload["json"] == json.loads(OWN)
    assert ["Velmira" in prompt for prompt in prompts] == [True, False]


async def test_a_second_copy_is_the_contracts_null(run):
    payload, _ = await run(COPY, COPY)
    assert payload["json"] is None
    assert payload["text"] == COPY


def test_any_model_but_the_reference_model_is_reported(tmp_path):
    small, reference = (
        Choice(tmp_path, "chosen", SimpleNamespace(id=name)) for name in ("smollm2-135m-instruct", REFERENCE_MODEL)
    )
    assert REFERENCE_MODEL in reservation(small)
    assert reservation(reference) is None
    assert reservation(Choice(tmp_path, "chosen", None, "missing")) is None
