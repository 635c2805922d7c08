"""The node's whole application around an engine that writes a given text, token by token, in this process."""

import contextlib
import functools
from dataclasses import replace

import numpy as np

from tests.support.application import application, built_models, with_engine
from tests.support.task_engine import TaskEngine, encoded
from worker_node.core.types import Busy
from worker_node.engines.protocol import EngineState, EngineStatus
from worker_node.tasks.generate.messages import TokenDelta

WRITER, EMBEDDER = "smollm2-135m-instruct", "all-minilm-l6-v2"


class WritingEngine(TaskEngine):
    """Writes the tokens of `text`, as many as the job may have. `jobs` are those that it got."""

    def __init__(self, text="One two three."):
        self.text = text
        self.tokenizer = None
        self.jobs = []
        self.ended = 0

    status = EngineStatus(EngineState.READY, "scripted")

    @property
    def prompt(self):
        """The text of the last prompt, special tokens included."""
        tokens = memoryview(self.jobs[-1].tokens).cast("i").tolist()
        return self.tokenizer.decode(tokens, skip_special_tokens=False)

    def wake(self):
        pass

    async def settled(self):
        return self.status

    async def generate(self, job):
        self.jobs.append(job)
        tokens = self.tokenizer.encode_prompt(self.text)[: job.max_new_tokens]
        try:
            for number, token in enumerate(tokens, start=1):
                whole = number == len(tokens)
                finish = ("length" if number == job.max_new_tokens else "stop") if whole else None
                yield TokenDelta(1, [token], finish, logprobs=[-0.5] if job.sampling.logprobs else None)
        finally:
            self.ended += 1

    async def embed(self, tokens, *, deadline, interactive):
        self.jobs.append(tokens)
        return encoded(np.eye(len(tokens), 384), busy=Busy(5))


@functools.cache
def _built(store):
    """Once for all tests: reading the tokenizers takes a second."""
    return built_models(store, WRITER, EMBEDDER)


def writing_models(store, engine):
    models = [with_engine(model, engine) for model in _built(store)]
    engine.tokenizer = models[0].tokenizer
    return models


@contextlib.asynccontextmanager
async def writing(store, text="One two three.", settings=None, **changed):
    """Yields a client, its `Node` and the engine behind all of its models; `changed` are fields of the writer."""
    engine = WritingEngine(text)
    models = writing_models(store, engine)
    models[0] = replace(models[0], **changed)
    async with application(models, settings) as (client, node):
        yield client, node, engine
