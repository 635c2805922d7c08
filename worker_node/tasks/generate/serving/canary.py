"""The canary of generation engines, which must pass before a model is ready.

A device that computes garbage raises no error (reference: openvino #38100), so the engine must answer a known question.
"""

from __future__ import annotations

import time

import numpy as np

from worker_node.core.types import Message
from worker_node.engines.process import CANARY_TIMEOUT_S, Canary, CanaryFailed
from worker_node.engines.protocol import TOKEN_DTYPE, Engine
from worker_node.models.canary import GenerationCanary
from worker_node.tasks.generate.messages import GenerateJob, TokenDelta
from worker_node.tasks.generate.serving.tokenization import ChatTokenizer


def generation_canary(known: GenerationCanary, tokenizer: ChatTokenizer) -> Canary:
    """Return the check that the engine's greedy answer to a known question holds the known words."""

    async def check(engine: Engine) -> None:
        prompt = tokenizer.encode_chat((Message("user", known.prompt),))
        job = GenerateJob(
            id=0,
            tokens=np.asarray(prompt, TOKEN_DTYPE).tobytes(),
            max_new_tokens=known.max_new_tokens,
            deadline=time.monotonic() + CANARY_TIMEOUT_S,
        )
        detokenizer = tokenizer.detokenizer()
        answer = "".join([detokenizer.push(delta.tokens) async for delta in engine.run(job, TokenDelta)])
        missing = [word for word in known.expected if word.casefold() not in answer.casefold()]
        if missing:
            raise CanaryFailed(f"the answer to a known question lacks {', '.join(map(repr, missing))}")

    return check
