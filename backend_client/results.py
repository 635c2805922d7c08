"""What calls take and return: plain frozen data. Texts and vectors are kept out of every repr."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum, auto
from typing import Annotated, Any, Literal, TypedDict

import numpy as np
import numpy.typing as npt
from pydantic import Field

from backend_client.options import FailoverOptions

Source = Literal["node", "cloud"]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try. `outcome` is "ok" or the error's class name; times are seconds, `started` since the call began.

    `source` is what was asked: a node or the cloud; `node` is its URL.
    """

    node: str
    outcome: str
    started: float
    duration: float
    sent: bool = True
    status: int | None = None
    code: str | None = None
    source: Source = "node"


class FailureKind(Enum):
    """What a failed attempt says of the node's health."""

    NONE = auto()
    CONNECTION = auto()
    SERVER = auto()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens in and out, as the model's tokenizer counts them."""

    prompt_tokens: int
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Who answered. `node` is its URL, or the cloud's; `device` is None for the cloud.

    `headers` are those of the node's reply, with their names in lower case.
    `npu_busy_delta_us` is the measured busy time of the NPU in microseconds, None where no NPU ran; `emulated` is True
    when that NPU was emulated. `joules` is the energy that the request used: of the NPU, or of the processor's whole
    package on a CPU or GPU; None where the node could not measure it.
    """

    source: Source
    node: str
    model: str
    device: str | None
    request_id: str
    attempts: tuple[Attempt, ...] = ()
    route_reason: str | None = None
    npu_busy_delta_us: int | None = None
    joules: float | None = None
    emulated: bool = False
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


def origin_fields(reply: Origin) -> dict[str, Any]:
    """The fields of a result that say who answered, for another result."""
    return {part.name: getattr(reply, part.name) for part in fields(Origin)}


@dataclass(frozen=True, slots=True, kw_only=True)
class RawReply(Origin):
    """A reply of OpenAI's dialect as it came: `body` is its JSON, or its bytes where it is none."""

    status: int = 200
    body: Any = field(default=None, repr=False)
    usage: Usage = Usage(0)


# Results of embedding.


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedResult(Origin):
    """One text's vector. Only vectors of an equal `space` may be compared."""

    vector: list[float] = field(repr=False)
    space: str
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedBatch(Origin):
    """Vectors of one request, float32 (n, d), in the order of its texts."""

    vectors: npt.NDArray[np.float32] = field(repr=False)
    space: str
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedManyResult:
    """Vectors of many texts, float32 (n, d), in their order, all of one `space` (None when there were no texts).

    `served` counts texts by who embedded them.
    """

    vectors: npt.NDArray[np.float32] = field(repr=False)
    space: str | None
    usage: Usage
    served: dict[str, int]
    attempts: tuple[Attempt, ...] = ()


# Results of generation and chat.


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds, as the node measured them; None where it did not say."""

    queue: float | None = None
    tokenize: float | None = None
    first_token: float | None = None
    generate: float | None = None
    total: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateResult(Origin):
    """An answer. `finish_reason` is "stop" or "length"."""

    text: str = field(repr=False)
    finish_reason: str
    usage: Usage
    timing: Timing


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model asks to be called; `arguments` is JSON as the model wrote it."""

    id: str
    name: str
    arguments: str = field(repr=False)

    def parsed_arguments(self) -> Any:
        """The arguments as an object. Raises ValueError where the model wrote no valid JSON."""
        return json.loads(self.arguments or "{}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatChoice:
    """One answer of a chat. `message` is OpenAI's object, to be appended to the messages of the next call."""

    text: str = field(repr=False)
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str
    reasoning: str = field(default="", repr=False)
    logprobs: Mapping[str, Any] | None = field(default=None, repr=False)
    message: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatResult(Origin):
    """A chat's answer; `n` of them in `choices`. `parsed` is an object of the pydantic model, where one was given."""

    choices: tuple[ChatChoice, ...]
    usage: Usage
    parsed: Any = field(default=None, repr=False)

    @property
    def text(self) -> str:
        """The text of the first choice; "" beside tool calls."""
        return self.choices[0].text

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tool calls of the first choice."""
        return self.choices[0].tool_calls

    @property
    def finish_reason(self) -> str:
        """stop, length, tool_calls or content_filter."""
        return self.choices[0].finish_reason

    @property
    def message(self) -> Mapping[str, Any]:
        """The first choice as an OpenAI message."""
        return self.choices[0].message


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A part of a tool call: the first has `id` and `name`, the others a part of its arguments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """A piece of a streamed chat: some text, or reasoning, or parts of tool calls, of the choice with that index."""

    text: str = field(default="", repr=False)
    tool_calls: tuple[ToolCallDelta, ...] = ()
    reasoning: str = field(default="", repr=False)
    choice: int = 0


# What calls take: options by name, as every method declares them.

Priority = Literal["interactive", "batch"]


Device = Literal["NPU", "GPU", "CPU"]


Name = Annotated[
    str | None, Field(pattern=r"^[^\x00-\x1f\x7f]{1,256}$", description="a name of 1 to 256 printable characters")
]
RequestId = Annotated[
    str | None, Field(pattern=r"^[A-Za-z0-9._:/+=@-]{1,128}$", description="1 to 128 letters, digits and ._:/+=@-")
]


Headers = Annotated[Mapping[str, str] | None, Field(description="a mapping of header names to str")]
Stop = Annotated[str | list[str] | None, Field(description="a str or a list of str")]


class CallOptions(TypedDict, total=False):
    """What every call takes; None means not given. Calls check names and types against these declarations.

    `timeout`: seconds for the whole call, retries and fallback included; the default bounds only the beginning of a
    stream. `model`: as the nodes name it, else their default. `require_device`: no other device may run it.
    `local_only`: never the cloud, whatever the settings say.
    `extra_headers` are sent to nodes with the request, but for those that frame it; to the cloud where
    `cloud.extra_headers` lists them. `request_id` is what logs call it (1 to 128 letters, digits and `._:/+=@-`), else
    the client makes one. `failover`: when to give up an answer; what it does not set is the client's.
    """

    timeout: float | None
    model: Name
    priority: Priority | None
    require_device: Device | None
    local_only: bool | None
    extra_headers: Headers
    request_id: RequestId
    failover: FailoverOptions | None


class EmbedOptions(CallOptions, total=False):
    """`truncate`: cut a text that is too long instead of refusing it.

    `input_type`: put the model's own prompt for queries or documents before each text; refused by a model without
    prompts. `dimensions`: cut the vectors to a size that the model declares. They are then of a space of their own.
    """

    truncate: bool | None
    input_type: Literal["query", "document"] | None
    dimensions: Annotated[int | None, Field(ge=1)]


class GenerateOptions(CallOptions, total=False):
    """Sampling; what is not given is the node's default (greedy). `raw` skips the model's chat template."""

    max_new_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    stop: Stop
    seed: int | None
    raw: bool | None


class ChatOptions(CallOptions, total=False):
    """What a chat takes beside its messages, under OpenAI's names; what is not given is the node's default.

    `response_format` is OpenAI's object, or a pydantic model: its schema is enforced and `parsed` is an object of it.
    `prompt_cache_key`, or `user`, names the conversation: its requests prefer one node.
    `top_k`, `min_p`, `repetition_penalty`, `min_tokens`, `stop_token_ids`, `ignore_eos` and `chat_template_kwargs` are
    what local servers know beside OpenAI's parameters.
    """

    tools: list[Any] | None
    tool_choice: str | dict[str, Any] | None
    parallel_tool_calls: bool | None
    response_format: Any
    max_tokens: int | None
    max_completion_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    n: int | None
    seed: int | None
    stop: Stop
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    logprobs: bool | None
    top_logprobs: int | None
    logit_bias: dict[str, Any] | None
    min_tokens: int | None
    stop_token_ids: list[Any] | None
    ignore_eos: bool | None
    reasoning_effort: str | None
    chat_template_kwargs: dict[str, Any] | None
    prompt_cache_key: str | None
    user: str | None


class RerankOptions(CallOptions, total=False):
    """`top_n`: return that many documents, the most relevant ones. `max_tokens_per_doc`: read no more of each."""

    top_n: int | None
    max_tokens_per_doc: int | None


class TranscribeOptions(CallOptions, total=False):
    """`language`: the code of the spoken language; else it is detected. `prompt`: text that came before.

    `timestamp_granularities`: what gets times, segments (the default), words, or both. `vad_filter`: skip what is not
    speech (True) or nothing (False); else the node decides. `chunking_strategy` is OpenAI's word for it: "auto", or an
    object of type "server_vad" with `threshold`, `silence_duration_ms` and `prefix_padding_ms`.
    """

    language: str | None
    prompt: str | None
    temperature: float | None
    timestamp_granularities: list[Literal["word", "segment"]] | None
    vad_filter: bool | None
    chunking_strategy: Literal["auto"] | dict[str, Any] | None


# Results of reranking and transcription.


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """A document and its relevance to the query; `index` is its place in the call. More is better."""

    index: int
    score: float
    text: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankResult(Origin):
    """Documents, the most relevant first; with `top_n` only that many."""

    documents: tuple[RankedDocument, ...]
    usage: Usage


@dataclass(frozen=True, slots=True)
class TranscriptionSegment:
    """A part of a recording, usually a sentence. Times are seconds from its beginning."""

    start: float
    end: float
    text: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class TranscriptionWord:
    """One word of a recording. Times are seconds from its beginning."""

    start: float
    end: float
    word: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcription(Origin):
    """The text of a recording; `duration` is its length in seconds.

    `language` is the language that was named or detected. `segments` and `words` are empty where the node reports none;
    words are reported where `timestamp_granularities` names them.
    """

    text: str = field(repr=False)
    language: str | None = None
    duration: float | None = None
    segments: tuple[TranscriptionSegment, ...] = ()
    words: tuple[TranscriptionWord, ...] = ()
