"""What calls take: options by name, as every method declares them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

Priority = Literal["interactive", "batch"]


Device = Literal["NPU", "GPU", "CPU"]


class CallOptions(TypedDict, total=False):
    """What every call takes; None means not given. Calls check names and types against these declarations.

    `timeout`: seconds for the whole call, retries and fallback included. `model`: as the nodes name it, else their
    default. `require_device`: no other device may run it. `local_only`: never the cloud, whatever the settings say.
    `extra_headers` are sent to nodes with the request, but for those that frame it; to the cloud where
    `cloud.extra_headers` lists them. `request_id` is what logs call it (1 to 128 letters, digits and `._:/+=@-`), else
    the client makes one.
    """

    timeout: float | None
    model: str | None
    priority: Priority | None
    require_device: Device | None
    local_only: bool | None
    extra_headers: Mapping[str, str] | None
    request_id: str | None


class EmbedOptions(CallOptions, total=False):
    """`truncate`: cut a text that is too long instead of refusing it.

    `input_type`: put the model's own prompt for queries or documents before each text; refused by a model without
    prompts. `dimensions`: cut the vectors to a size that the model declares. They are then of a space of their own.
    """

    truncate: bool | None
    input_type: Literal["query", "document"] | None
    dimensions: int | None


class GenerateOptions(CallOptions, total=False):
    """Sampling; what is not given is the node's default (greedy). `raw` skips the model's chat template."""

    max_new_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    stop: str | list[str] | None
    seed: int | None
    raw: bool | None


class ChatOptions(CallOptions, total=False):
    """What a chat takes beside its messages, under OpenAI's names; what is not given is the node's default.

    `response_format` is OpenAI's object, or a pydantic model: its schema is enforced and `parsed` is an object of it.
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
    stop: str | list[str] | None
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
