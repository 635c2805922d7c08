"""What the replies of each route say, for all callers and servers; `routes` says which check is a route's. No I/O.

Every function raises NotAnAnswer for a reply that does not answer its request. What is expected follows from the
request alone as nodes accept it, so that no request can make a good reply a wrong one."""

from __future__ import annotations

import base64
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, get_args

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from backend_client.http.messages import NotAnAnswer, Vectors, check_vectors
from backend_client.results import ChatChoice, ToolCall, TranscriptionSegment, TranscriptionWord

# OpenAI's, Together's "eos" and Mistral's "model_length". Others mean that there is no answer: "abort" (vLLM), "error".
FinishReason = Literal["stop", "length", "tool_calls", "function_call", "content_filter", "eos", "model_length"]

# What a transcription may be asked for that is not JSON.
_PLAIN = frozenset({"text", "srt", "vtt"})


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Read a reply whose fields may be missing or of any type."""
    try:
        yield
    except NotAnAnswer:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise NotAnAnswer(f"the reply is not {what} ({type(error).__name__})") from None


def openai_vectors(request: Mapping[str, Any], body: Any) -> Vectors:
    return vectors_in(body, _texts_in(request.get("input")))


def vectors_in(body: Any, count: int | None) -> Vectors:
    """The vectors of a reply in OpenAI's form, in the order of their texts."""
    with reading("a list of embeddings"):
        rows = body["data"]
        vectors = [_vector(row["embedding"]) for row in rows]
        _check_indices([row["index"] for row in rows], len(rows), in_order=True)
    if not vectors or len({len(vector) for vector in vectors}) != 1:
        raise NotAnAnswer("not one vector of the same length for each text")
    return check_vectors(np.stack(vectors), count)


def plain_vectors(field: str, request: Mapping[str, Any], body: Any) -> Vectors:
    """The vectors of the texts in a field: of /embeddings, and of /api/embed, where an empty text alone is no text."""
    given = request.get(field)
    count = 1 if isinstance(given, str) else len(given) if isinstance(given, list) else None
    with reading("a list of embeddings"):
        return _rows(body["embeddings"], count if given or field == "texts" else 0)


def single_vector(request: Mapping[str, Any], body: Any) -> Vectors:
    """The vector of /api/embeddings, none for an empty prompt."""
    with reading("an embedding"):
        rows = [body["embedding"]]
        return _rows(rows, 1) if request.get("prompt") else _rows([row for row in rows if row], 0)


def _rows(rows: Any, count: int | None) -> Vectors:
    vectors = [_vector(row) for row in _typed(rows, list)]
    if len({len(vector) for vector in vectors}) > 1:
        raise NotAnAnswer("not one vector of the same length for each text")
    return check_vectors(np.stack(vectors) if vectors else np.empty((0, 0), np.float32), count)


def _vector(value: Any) -> Vectors:
    """A list of numbers, or float32 as base64."""
    if isinstance(value, str):
        return np.frombuffer(base64.b64decode(value, validate=True), "<f4")
    if not isinstance(value, list) or not {*map(type, value)} <= {int, float}:
        raise TypeError
    with np.errstate(over="ignore"):
        return np.asarray(value, np.float32)


def _check_indices(indices: list[Any], count: int, *, in_order: bool = False) -> None:
    """Each of `indices` is a place below `count` and is there once; `in_order`: they are all places, in order."""
    if not all(type(index) is int and 0 <= index < count for index in indices) or len({*indices}) != len(indices):
        raise NotAnAnswer("an index is out of range or there twice")
    if in_order and indices != list(range(count)):
        raise NotAnAnswer("the rows are not in the order of the texts")


def ranking_in(body: Any, count: int, most: int) -> list[tuple[int, float]]:
    """The indices of `most` of `count` documents with their scores, as a reply has them."""
    with reading("a ranking"):
        ranked = [(row["index"], row["relevance_score"]) for row in body["results"]]
        if len(ranked) != min(most, count):
            raise NotAnAnswer(f"{min(most, count)} documents were asked for, {len(ranked)} came")
        _check_indices([index for index, _ in ranked], count)
        if not {type(score) for _, score in ranked} <= {int, float}:
            raise TypeError
        scores = [(index, float(score)) for index, score in ranked]
    if not all(math.isfinite(score) for _, score in scores):
        raise NotAnAnswer("a score is NaN or infinite")
    return scores


def ranked_texts(request: Mapping[str, Any], body: Any) -> list[tuple[int, float]]:
    """A ranking: a list of all `texts` as TEI has it, or the best of the `documents` as Cohere and Jina have them."""
    texts, documents, most = request.get("texts"), request.get("documents"), request.get("top_n")
    if isinstance(texts, list):
        with reading("a ranking"):
            rows = [{"index": row["index"], "relevance_score": row["score"]} for row in body]
        return ranking_in({"results": rows}, len(texts), len(texts))
    count = len(documents) if isinstance(documents, list) else 0
    return ranking_in(body, count, most if type(most) is int else count)


def count_in(body: Any, field: str = "count") -> int:
    with reading("a token count"):
        count = body[field]
        if type(count) is not int or count < 0:
            raise TypeError
        return count


def choices_in(body: Any) -> tuple[ChatChoice, ...]:
    with reading("a chat completion"):
        choices = tuple(map(_choice, body["choices"]))
        if not choices:
            raise LookupError
        return choices


class _Part(BaseModel):
    # A newer node may say more, and that must not make it unusable.
    model_config = ConfigDict(extra="ignore", strict=True, hide_input_in_errors=True)


class _Tokens(_Part):
    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(ge=0)


class _Milliseconds(_Part):
    queue: FiniteFloat | None = None
    tokenize: FiniteFloat | None = None
    first_token: FiniteFloat | None = None
    generate: FiniteFloat | None = None
    total: FiniteFloat | None = None


class _Generation(_Part):
    """The body of an answer to /inference, or the data of its last event, as far as the client uses it."""

    model: str
    device: str
    finish_reason: FinishReason
    usage: _Tokens
    timing_ms: _Milliseconds | None = None
    npu_busy_delta_us: int | None = Field(default=None, ge=0)
    joules: float | None = None
    emulated: bool = False


def generation_in(_: Mapping[str, Any], body: Any) -> Any:
    check_generation(body)
    with reading("an answer of /inference"):
        _typed(body["text"], str)
    return body


def check_generation(body: Any) -> None:
    """Check the body of a reply of /inference, or the data of its last event, but for the text."""
    try:
        _Generation.model_validate(body)
    except ValidationError as error:
        fields = ", ".join(sorted({".".join(map(str, problem["loc"])) or "body" for problem in error.errors()}))
    else:
        return
    raise NotAnAnswer(f"the reply lacks a valid {fields}: this is not a node's /inference")


def check_ends(ends: Collection[tuple[int, object, bool]], count: int) -> None:
    """Check the choices of an answer, whole or streamed: `count` came, and each of them has ended.

    `ends`: of each choice the index, the finish_reason, and whether there is a tool call.
    """
    for _, reason, calls in ends:
        if not reason:
            raise NotAnAnswer("the answer ended without a finish_reason")
        if reason not in get_args(FinishReason):
            raise NotAnAnswer("the answer ended with a finish_reason that OpenAI's API does not have")
        if reason == "tool_calls" and not calls:
            raise NotAnAnswer("the finish_reason is tool_calls, and no tool is called")
    if sorted(index for index, _, _ in ends) != [*range(count)]:
        raise NotAnAnswer(f"the answer must have {count} choices and has {len(ends)}")


def chats_asked(request: Mapping[str, Any]) -> int:
    """How many choices a chat asks for. Servers refuse an `n` that is not a positive number."""
    n = request.get("n")
    return n if type(n) is int and n > 0 else 1


def completions_asked(request: Mapping[str, Any]) -> int:
    """How many choices the prompts of a completion ask for."""
    return (_texts_in(request.get("prompt")) or 1) * chats_asked(request)


def text_choices(request: Mapping[str, Any], body: Any) -> Any:
    with reading("a completion"):
        found = [(choice["index"], _typed(choice["finish_reason"], str), False) for choice in body["choices"]]
        for choice in body["choices"]:
            _typed(choice["text"], str)
        check_ends(found, completions_asked(request))
    return body


def response_in(_: Mapping[str, Any], body: Any) -> Any:
    """A response of /v1/responses that has ended."""
    with reading("a response"):
        if body["status"] not in {"completed", "incomplete"}:
            raise ValueError
        for item in _typed(body["output"], list):
            _typed(item["type"], str)
    return body


def message_in(_: Mapping[str, Any], body: Any) -> Any:
    """An answer of Anthropic's /v1/messages."""
    with reading("a message"):
        if body["type"] != "message":
            raise ValueError
        for block in _typed(body["content"], list):
            _typed(block["type"], str)
        _typed(body["stop_reason"], str)
    return body


def ollama_answer(request: Mapping[str, Any], body: Any) -> Any:  # noqa: ARG001  (as all checks)
    """An answer of Ollama's routes that came whole."""
    with reading("an answer of Ollama's API"):
        if body["done"] is not True:
            raise ValueError
        check_ollama_part(body)
    return body


def check_ollama_part(part: Mapping[str, Any]) -> None:
    """Check one object of an answer: all but the last hold text, or a message."""
    if "message" in part:
        _typed(part["message"].get("content"), str, none=True)
    elif "response" in part or not part.get("done"):
        _typed(part["response"], str)


def prompt_in(_: Mapping[str, Any], body: Any) -> Any:
    """The text of /detokenize."""
    with reading("a text"):
        _typed(body["prompt"], str)
    return body


def completion_in(request: Mapping[str, Any], body: Any) -> tuple[ChatChoice, ...]:
    choices = choices_in(body)
    with reading("a chat completion"):
        ends = [
            (part.get("index", place), choice.finish_reason, bool(part["message"].get("tool_calls")))
            for place, (choice, part) in enumerate(zip(choices, body["choices"], strict=True))
        ]
        check_ends(ends, chats_asked(request))
    return choices


def _choice(choice: Mapping[str, Any]) -> ChatChoice:
    message = choice["message"]
    return ChatChoice(
        text=_text(message.get("content")),
        # Other kinds of tools are in the message.
        tool_calls=tuple(_call(call) for call in message.get("tool_calls") or () if call.get("type") != "custom"),
        finish_reason=_text(choice.get("finish_reason")),
        reasoning=_text(message.get("reasoning_content")),
        logprobs=choice.get("logprobs"),
        message={name: value for name, value in message.items() if value is not None or name == "content"},
    )


def _call(call: Mapping[str, Any]) -> ToolCall:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    if not name:
        raise TypeError
    # Not every server behind the cloud's API numbers its calls.
    return ToolCall(str(call.get("id") or ""), _typed(name, str), _typed(arguments, str))


def _text(value: object) -> str:
    return _typed(value, str, none=True) or ""


def transcription_in(body: Any) -> dict[str, Any]:
    """What a transcription in JSON says: the fields of `Transcription`."""
    with reading("a transcription"):
        return {
            "text": _typed(body["text"], str),
            "language": _typed(body.get("language"), str, none=True),
            "duration": _seconds(body.get("duration"), none=True),
            "segments": tuple(
                TranscriptionSegment(_seconds(part["start"]), _seconds(part["end"]), _typed(part["text"], str))
                for part in body.get("segments") or ()
            ),
            "words": tuple(
                TranscriptionWord(_seconds(part["start"]), _seconds(part["end"]), _typed(part["word"], str))
                for part in body.get("words") or ()
            ),
        }


def form_value(form: Mapping[str, Any], name: str) -> str:
    """A field of a form as nodes read it: the last value that is not blank, without the blanks around it."""
    given = form.get(name)
    values = [str(value).strip() for value in (given if isinstance(given, list) else [given or ""])]
    return next((value for value in reversed(values) if value), "")


def transcript_in(request: Mapping[str, Any], body: Any) -> Any:
    """The reply to a form."""
    if form_value(request, "response_format") not in _PLAIN:
        return transcription_in(body)
    if not isinstance(body, bytes):
        raise NotAnAnswer("the reply is not plain text")
    return body


def _typed(value: Any, kind: type, *, none: bool = False) -> Any:
    if not isinstance(value, kind) and not (none and value is None):
        raise TypeError
    return value


def _seconds(value: Any, *, none: bool = False) -> Any:
    if none and value is None:
        return None
    # OpenAI itself sends the duration as a text in some versions.
    seconds = float(value)
    if isinstance(value, bool) or not math.isfinite(seconds):
        raise ValueError
    return seconds


def _texts_in(given: object) -> int | None:
    """How many texts an `input` or `prompt` holds; None for what is not one."""
    if not isinstance(given, str | list) or not given:
        return None
    # Token ids without a list around them are one text.
    return 1 if isinstance(given, str) or isinstance(given[0], int) else len(given)
