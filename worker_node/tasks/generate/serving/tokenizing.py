"""Tokenization and templates as functions of plain values, for the preparation processes (`serving.large_texts`)."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from worker_node.core.types import Message, Rendering
from worker_node.engines.protocol import TOKEN_DTYPE
from worker_node.tasks.generate.serving.tokenization import ChatTokenizer

_TOKENIZERS = 4


@lru_cache(_TOKENIZERS)
def _tokenizer(directory: str, context_limit: int) -> ChatTokenizer:
    return ChatTokenizer(Path(directory), context_limit)


def encode(directory: str, context_limit: int, text: str, special: bool, last: int | None) -> bytes:
    """The token ids (int32) of a text. Raises as `ChatTokenizer.encode_prompt`."""
    ids = _tokenizer(directory, context_limit).encode_prompt(text, special=special, last=last)
    return np.asarray(ids, TOKEN_DTYPE).tobytes()


def render(
    directory: str,
    context_limit: int,
    messages: list[Any],
    tools: list[dict[str, Any]] | None,
    think: bool | None,
    rendering: dict[str, Any],
    bounded: bool,
) -> str:
    """A conversation in the model's own template. Raises as `ChatTokenizer.render`."""
    return _tokenizer(directory, context_limit).render(
        msgspec.convert(messages, list[Message]),
        tools,
        think,
        msgspec.convert(rendering, Rendering),
        bounded=bounded,
    )


def decode(directory: str, context_limit: int, tokens: bytes) -> str:
    """The text of token ids (int32), special ones included."""
    ids = np.frombuffer(tokens, TOKEN_DTYPE).tolist()
    return _tokenizer(directory, context_limit).decode(ids, skip_special_tokens=False)


def decode_each(directory: str, context_limit: int, tokens: bytes) -> list[str]:
    """The text of each of the token ids (int32), special ones included."""
    tokenizer = _tokenizer(directory, context_limit)
    return [tokenizer.decode([token], skip_special_tokens=False) for token in np.frombuffer(tokens, TOKEN_DTYPE)]
