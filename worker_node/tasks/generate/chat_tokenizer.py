"""Conversations and texts to the token ids of a generation model, counted exactly and never truncated silently."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import openvino_genai as genai

from worker_node.core.errors import BadRequest, ConfigurationError, ContextLengthExceeded
from worker_node.models.directory import ChatTemplate, find_template
from worker_node.sandbox.pool import PreparationLimits, PreparationPool
from worker_node.serving.row_tokenizer import check_ids
from worker_node.tasks.generate.request import Message, Rendering

# A call is too short to be divided among threads.
_PROPERTIES = {"INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1}
_AS_USUAL = Rendering()
_REASON = "Minja's error: "
# One of these any template renders: some take no system message, some want one.
_PROBES = (("user",), ("system", "user"), ("user", "assistant", "user"))


class ChatTokenizer:
    """The tokenizer and chat template of a generation model, which are GenAI's.

    Its calls take a millisecond or two for ordinary prompts; `LargeTexts` runs large ones apart. A text that cannot
    fit the model's context, whatever its tokens are, is refused before it is tokenized.
    """

    def __init__(self, directory: Path, context_limit: int) -> None:
        self.directory = directory
        template = find_template(directory)
        try:
            # Holds the GIL for 50 to 160 ms (49,000 tokens).
            self._tokenizer = genai.Tokenizer(str(directory), **_PROPERTIES)
            vocabulary = self._tokenizer.get_vocab()
        except RuntimeError as error:
            files = "openvino_tokenizer.xml or openvino_detokenizer.xml"
            raise ConfigurationError(f"{directory}: {files} cannot be loaded: {first_line(error)}") from None
        if template is not None:
            self._tokenizer.set_chat_template(template.text)
            self._check_template(template)
        self.context_limit = context_limit
        # The model's own template, in Jinja: whether it has a place for tools, and knows of reasoning.
        self.chat_template = str(self._tokenizer.chat_template)
        self.takes_tools = "tools" in self.chat_template
        self.can_think = "think" in self.chat_template
        self._longest_piece = max(map(len, vocabulary))
        self._table = [b""] * (max(vocabulary.values()) + 1)
        self.byte_table: Sequence[bytes] | None = self._table if self._fill_table(vocabulary) else None
        # Some graphs truncate longer texts silently.
        self._counts_up_to = len(self.encode_any("a " * (context_limit + 2), special=False))

    def _check_template(self, template: ChatTemplate) -> None:
        problem = ""
        for roles in _PROBES:
            history = [{"role": role, "content": "a"} for role in roles]
            try:
                self._tokenizer.apply_chat_template(history, add_generation_prompt=True)
            except RuntimeError as error:
                problem = problem or first_line(error)
            else:
                return
        raise ConfigurationError(f"{template.file}: the chat template cannot be used: {problem}")

    def _fill_table(self, vocabulary: Mapping[bytes, int]) -> bool:
        """Fill the table of the tokens' bytes, without text for special ones; False if a token is not its bytes."""
        ids = [[token] for token in range(len(self._table))]
        shown = self._tokenizer.decode(ids, skip_special_tokens=True)
        for piece, token in vocabulary.items():
            text = piece.decode("utf-8", "ignore")
            if text.encode() != piece or text == shown[token]:
                self._table[token] = piece
            elif shown[token]:
                return False
        return len(vocabulary) == len(ids)

    def encode_any(self, text: str, *, special: bool) -> list[int]:
        """The token ids of a text of any length, or as many as the tokenizer returns at most."""
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=special).input_ids.data[0].tolist()
        return tokens

    def encode_prompt(self, prompt: str, *, special: bool = True) -> list[int]:
        """The token ids of a prompt, with `special` ones around it if wanted. Raises ContextLengthExceeded."""
        self.reject_oversized(len(prompt))
        return self.check_count(self.encode_any(prompt, special=special))

    def check_count(self, tokens: list[int]) -> list[int]:
        """The tokens of a prompt. Raises ContextLengthExceeded for more than the model's context has."""
        if len(tokens) >= self._counts_up_to:
            raise ContextLengthExceeded(
                f"the prompt has {len(tokens)} tokens or more and the model's context is {self.context_limit}",
                param="prompt",
                tokens=len(tokens),
                limit=self.context_limit - 1,
            )
        return tokens

    def check_ids(self, ids: Sequence[int], param: str | None = None) -> list[int]:
        """Return token ids that came as such. Raises BadRequest if they are none of this model's."""
        check_ids(ids, len(self._table), param)
        return list(ids)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """The token ids of a conversation, ready for the answer. Raises BadRequest, ContextLengthExceeded."""
        # A template writes the special tokens itself.
        return self.encode_prompt(self.render(messages), special=not self.chat_template)

    def opening(self) -> str:
        """The text of what the tokenizer puts before a text, as the beginning of a sequence; empty where it is none."""
        bare, whole = (self.encode_any("a", special=special) for special in (False, True))
        at = next((n for n in range(len(whole)) if whole[n : n + len(bare)] == bare), 0)
        return self.decode(whole[:at], skip_special_tokens=False) if at else ""

    def render(self, messages: Sequence[Message], rendering: Rendering = _AS_USUAL) -> str:
        """A conversation in the model's own template; without one, its only message. Raises as `encode_chat`."""
        self.check_size(messages)
        if not self.chat_template:
            return _only_message(messages)
        history = [_template_message(message) for message in _joined_turns(messages)]
        extra = dict(rendering.variables)
        if rendering.think is not None:
            extra["enable_thinking"] = rendering.think
        answers = rendering.answer_prompt and not rendering.continue_last
        try:
            text = self._tokenizer.apply_chat_template(history, answers, tools=rendering.tools, extra_context=extra)
        except RuntimeError as error:
            raise BadRequest(
                f"the model's chat template refuses this conversation: {first_line(error)}", param="messages"
            ) from error
        if not rendering.continue_last:
            return str(text)
        last = messages[-1].content.strip()
        at = text.rfind(last)
        if not last or at < 0:
            problem = "the last message has no text that could be continued"
            raise BadRequest(f"continue_final_message: {problem}", param="messages")
        return str(text[: at + len(last)])

    def check_size(self, messages: Sequence[Message]) -> None:
        """Raise ContextLengthExceeded for too many messages or characters."""
        if len(messages) > self.context_limit:
            raise ContextLengthExceeded(
                f"the conversation has {len(messages)} messages, which cannot fit the model's context of "
                f"{self.context_limit} tokens",
                param="messages",
                tokens=len(messages),
                limit=self.context_limit,
            )
        self.reject_oversized(sum(len(m.content) for m in messages))

    def piece(self, token: int) -> bytes:
        """The bytes that a token stands for; none for a special one and for one beyond the vocabulary."""
        if token >= len(self._table):
            return b""
        return self._table[token] if self.byte_table is not None else self.decode([token]).encode()

    def reject_oversized(self, characters: int) -> None:
        """Raise ContextLengthExceeded for more characters than the longest tokens could stand for."""
        if characters > self.context_limit * self._longest_piece:
            raise ContextLengthExceeded(
                f"the prompt has {characters} characters, which cannot fit the model's context of "
                f"{self.context_limit} tokens",
                param="prompt",
                # At least so many.
                tokens=-(-characters // self._longest_piece),
                limit=self.context_limit,
            )

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of tokens; those beyond the vocabulary have none."""
        known = [token for token in tokens if token < len(self._table)]
        return str(self._tokenizer.decode(known, skip_special_tokens=skip_special_tokens)) if known else ""


def first_line(error: RuntimeError) -> str:
    """What GenAI says, without the places in its own source."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reasons = [line.removeprefix(_REASON) for line in lines if line.startswith(_REASON)]
    others = [line for line in lines if not line.startswith(("Exception from", "Check '"))]
    return (reasons or others or lines or ["no reason given"])[0][:200]


def _joined_turns(messages: Sequence[Message]) -> list[Message]:
    """The conversation with neighbouring turns of one role joined, as Ollama joins them; results of tools stay apart.

    Many templates want one system message, or turns that alternate. Clients send instructions in several messages, the
    user's question after another turn of the user's, and each of several calls as an item.
    """
    joined: list[Message] = []
    for role, neighbours in groupby(messages, key=lambda message: message.role):
        turns = list(neighbours)
        if role == "tool":
            joined += turns
            continue
        text = "\n\n".join(turn.content for turn in turns if turn.content)
        joined.append(Message(role, text, tuple(call for turn in turns for call in turn.tool_calls)))
    return joined


def _only_message(messages: Sequence[Message]) -> str:
    """The prompt of a model without a chat template, as in OpenVINO's servers."""
    if len(messages) != 1 or messages[0].tool_calls:
        raise BadRequest(
            f"the model has no chat template, so it takes exactly one message and no tools; this conversation has "
            f"{len(messages)}",
            param="messages",
        )
    return messages[0].content


def _template_message(message: Message) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        fields["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_name is not None:
        fields["name"] = message.tool_name
    return fields


# What runs in the preparation processes: functions of plain values.

_TOKENIZERS = 4


@lru_cache(_TOKENIZERS)
def _tokenizer(directory: str, context_limit: int) -> ChatTokenizer:
    return ChatTokenizer(Path(directory), context_limit)


def encode(directory: str, context_limit: int, text: str, special: bool) -> list[int]:
    return _tokenizer(directory, context_limit).encode_any(text, special=special)


def render(directory: str, context_limit: int, messages: list[Any], rendering: dict[str, Any]) -> str:
    turns = msgspec.convert(messages, list[Message])
    return _tokenizer(directory, context_limit).render(turns, msgspec.convert(rendering, Rendering))


# 4,000 bytes of any text take 1 to 3 ms (SmolLM2's tokenizer), which is what handing them to a process costs.
_INLINE_BYTES = 4_000
# What a message costs beside its text, in bytes.
_COST_OF_A_MESSAGE = 20
# Most of a process's memory is address space that its runtime reserves and never touches.
_LIMITS = PreparationLimits(processes=2, cpu_s=10.0, memory_bytes=8 * 2**30)
_MODULES = ("worker_node.tasks.generate.chat_tokenizer",)


def is_small(texts: Sequence[str]) -> bool:
    if sum(map(len, texts)) > _INLINE_BYTES:
        return False
    return sum(len(text.encode(errors="replace")) for text in texts) <= _INLINE_BYTES


def _is_small_conversation(messages: Sequence[Message], rendering: Rendering) -> bool:
    if _COST_OF_A_MESSAGE * len(messages) > _INLINE_BYTES:
        return False
    calls = [call.arguments for message in messages for call in message.tool_calls]
    parts = [message.content for message in messages]
    if calls or rendering.tools or rendering.variables:
        parts.append(msgspec.json.encode((calls, rendering.tools, rendering.variables)).decode())
    return is_small(parts)


class LargeTexts:
    """Tokenizes small prompts in place, and large ones in killable processes, until `close`.

    The chat template is a native call that holds the GIL: 660,000 characters, which a client may send, would stop the
    event loop for most of a second.
    """

    def __init__(self, pool: PreparationPool | None = None) -> None:
        self._pool = pool or PreparationPool(_LIMITS, _MODULES)

    async def close(self) -> None:
        await self._pool.close()

    async def encode(self, tokenizer: ChatTokenizer, text: str, *, deadline: float, special: bool = True) -> list[int]:
        """The token ids of a prompt. Raises as `ChatTokenizer.encode_prompt` and `PreparationPool.run`."""
        if is_small([text]):
            return tokenizer.encode_prompt(text, special=special)
        tokenizer.reject_oversized(len(text))
        ids: list[int] = await self._run(encode, tokenizer, text, special, deadline=deadline, param="prompt")
        return tokenizer.check_count(ids)

    async def render(
        self,
        tokenizer: ChatTokenizer,
        messages: Sequence[Message],
        rendering: Rendering = _AS_USUAL,
        *,
        deadline: float,
    ) -> str:
        """Return a conversation in the model's own template. Raises as `ChatTokenizer.render` and `encode`."""
        if _is_small_conversation(messages, rendering):
            return tokenizer.render(messages, rendering)
        tokenizer.check_size(messages)
        plain = msgspec.to_builtins((messages, rendering))
        text: str = await self._run(render, tokenizer, *plain, deadline=deadline, param="messages")
        return text

    async def _run(self, function: Any, tokenizer: ChatTokenizer, *arguments: Any, deadline: float, param: str) -> Any:
        directory = str(tokenizer.directory)
        return await self._pool.run(
            function, directory, tokenizer.context_limit, *arguments, deadline=deadline, param=param
        )
