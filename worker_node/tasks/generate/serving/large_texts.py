"""Tokenizes prompts: small ones at once, large ones in processes that can be killed, so that they delay nobody.

The tokenizer and the chat template of a generation model are native calls that hold the GIL: 660,000 characters, which
a client may send, would stop the event loop for most of a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from worker_node.core.types import Message, Rendering
from worker_node.engines.protocol import TOKEN_DTYPE
from worker_node.sandbox.pool import PreparationLimits, PreparationPool
from worker_node.settings import NodeSettings
from worker_node.tasks.generate.serving import tokenizing
from worker_node.tasks.generate.serving.tokenization import ChatTokenizer

# 4,000 bytes of any text take 1 to 3 ms (SmolLM2's tokenizer), which is what handing them to a process costs.
_INLINE_BYTES = 4_000
_INLINE_TOKENS = 2_000
# Decoding one by one costs a call each.
_INLINE_SINGLE_TOKENS = 200
# Most of a process's memory is address space that its runtime reserves and never touches.
_LIMITS = PreparationLimits(processes=2, cpu_s=10.0, memory_bytes=8 * 2**30)
_MODULES = ("worker_node.tasks.generate.serving.tokenizing",)
_AS_USUAL = Rendering()


def is_small(texts: Sequence[str]) -> bool:
    """Whether texts are tokenized as quickly as they are handed to a process."""
    if sum(map(len, texts)) > _INLINE_BYTES:
        return False
    return sum(len(text.encode(errors="replace")) for text in texts) <= _INLINE_BYTES


class LargeTexts:
    """The processes that tokenize large texts, until `close`. They are started when the first one comes."""

    def __init__(self, pool: PreparationPool | None = None) -> None:
        self._pool = pool or PreparationPool(_LIMITS, _MODULES)

    async def close(self) -> None:
        """End the processes."""
        await self._pool.close()

    async def encode(
        self, tokenizer: ChatTokenizer, text: str, *, deadline: float, special: bool = True, last: int | None = None
    ) -> list[int]:
        """Return the token ids of a prompt, or the `last` of them; `deadline` is monotonic seconds.

        Raises as `ChatTokenizer.encode_prompt`; BadRequest for a text that takes too long; Overloaded,
        DeadlineExceeded, EngineUnavailable.
        """
        if is_small([text]):
            return tokenizer.encode_prompt(text, special=special, last=last)
        if last is None:
            tokenizer.refuse_hopeless(len(text))
        ids = await self._run(tokenizing.encode, tokenizer, text, special, last, deadline=deadline, param="prompt")
        tokens: list[int] = np.frombuffer(ids, TOKEN_DTYPE).tolist()
        return tokens

    async def render(
        self,
        tokenizer: ChatTokenizer,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        think: bool | None = None,
        rendering: Rendering = _AS_USUAL,
        *,
        deadline: float,
        bounded: bool = True,
    ) -> str:
        """Return a conversation in the model's own template. Raises as `ChatTokenizer.render` and `encode`."""
        if is_small([message.content for message in messages]):
            return tokenizer.render(messages, tools, think, rendering, bounded=bounded)
        tokenizer.check_size(messages, bounded=bounded)
        text: str = await self._run(
            tokenizing.render,
            tokenizer,
            msgspec.to_builtins(messages),
            None if tools is None else list(tools),
            think,
            msgspec.to_builtins(rendering),
            bounded,
            deadline=deadline,
            param="messages",
        )
        return text

    async def decode(self, tokenizer: ChatTokenizer, tokens: Sequence[int], *, deadline: float) -> str:
        """Return the text of token ids, special ones included. Raises as `encode`."""
        if len(tokens) <= _INLINE_TOKENS:
            return tokenizer.decode(tokens, skip_special_tokens=False)
        ids = np.asarray(tokens, TOKEN_DTYPE).tobytes()
        text: str = await self._run(tokenizing.decode, tokenizer, ids, deadline=deadline, param="tokens")
        return text

    async def decode_each(self, tokenizer: ChatTokenizer, tokens: Sequence[int], *, deadline: float) -> list[str]:
        """Return the text of each token id, special ones included. Raises as `encode`."""
        if len(tokens) <= _INLINE_SINGLE_TOKENS:
            return [tokenizer.decode([token], skip_special_tokens=False) for token in tokens]
        ids = np.asarray(tokens, TOKEN_DTYPE).tobytes()
        texts: list[str] = await self._run(tokenizing.decode_each, tokenizer, ids, deadline=deadline, param="tokens")
        return texts

    async def _run(self, function: Any, tokenizer: ChatTokenizer, *arguments: Any, deadline: float, param: str) -> Any:
        directory = str(tokenizer.directory)
        return await self._pool.run(
            function, directory, tokenizer.context_limit, *arguments, deadline=deadline, param=param
        )


def large_texts(_settings: NodeSettings) -> LargeTexts:
    """The processes of a node."""
    return LargeTexts()
