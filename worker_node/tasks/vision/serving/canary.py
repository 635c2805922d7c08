"""The canary of vision engines, which must pass before a model is ready.

Models come without known answers here. That the engine answers a text with a picture at all shows that the graphs of
vision and language fit each other on this device.
"""

from __future__ import annotations

import time

import numpy as np

from worker_node.core.types import Message, Picture
from worker_node.engines.process import CANARY_TIMEOUT_S, Canary, CanaryFailed
from worker_node.engines.protocol import TOKEN_DTYPE, Engine
from worker_node.tasks.generate.messages import GenerateJob, RawPicture, TokenDelta
from worker_node.tasks.generate.serving.picture_rules import PictureRules
from worker_node.tasks.generate.serving.pictures import picture_prompt, with_tags
from worker_node.tasks.generate.serving.tokenization import ChatTokenizer

_SIDE = 64
_QUESTION = "What is this?"


def vision_canary(tokenizer: ChatTokenizer, rules: PictureRules) -> Canary:
    """Return the check that the engine answers a question about a grey picture with a token."""

    async def check(engine: Engine) -> None:
        picture = Picture("", 0, "canary")
        turns, pictures = with_tags([Message("user", _QUESTION, pictures=(picture,))])
        text = tokenizer.render(turns)
        grey = RawPicture(_SIDE, _SIDE, bytes([128]) * (_SIDE * _SIDE * 3))
        job = GenerateJob(
            id=0,
            tokens=np.asarray(tokenizer.encode_rendered(_QUESTION), TOKEN_DTYPE).tobytes(),
            max_new_tokens=1,
            deadline=time.monotonic() + CANARY_TIMEOUT_S,
            ignore_eos=True,
            seen=picture_prompt(text.removeprefix(tokenizer.opening()), pictures, {"canary": grey}, rules),
        )
        if not [token async for delta in engine.run(job, TokenDelta) for token in delta.tokens]:
            raise CanaryFailed("a question about a picture got no answer")

    return check
