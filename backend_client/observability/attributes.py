"""What a call's span says, in the names of OpenTelemetry's GenAI semantic conventions (status: development).

https://github.com/open-telemetry/semantic-conventions-genai/blob/main/docs/gen-ai/gen-ai-spans.md. Numbers, and names
of models, devices and servers: no prompt, answer or stop sequence, which are the user's text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from opentelemetry.util.types import AttributeValue

from backend_client.http.messages import Request
from backend_client.http.routes import ROUTES
from backend_client.results import Origin, Source, Usage

Attributes = dict[str, AttributeValue]

_TRANSCRIBE: Final = "transcribe"
# Operations whose answers are made of tokens.
_WRITING: Final = frozenset({"chat", "text_completion"})

# The conventions' own value for whatever speaks OpenAI's API; there is none for nodes.
_PROVIDERS: Final[dict[Source, str]] = {"node": "npu-node", "cloud": "openai"}
_PORTS: Final = {"http": 80, "https": 443}
_SAMPLING: Final = ("max_tokens", "temperature", "top_p", "top_k", "seed")


def operation_name(request: Request) -> str:
    """`embeddings`, `rerank`, `transcribe`, `tokenize`, `detokenize`, `chat`, or `text_completion` for a prompt that is
    continued as it stands; as nodes call it."""
    raw = request.path == "/inference" and request.body.get("raw")
    return "text_completion" if raw else ROUTES[request.path].operation


def tokens_of(operation: str, usage: Usage) -> Mapping[str, int]:
    """The tokens that an answer counts, by the conventions' `type`. A recording has none: its size is its seconds."""
    found = {} if operation == _TRANSCRIBE else {"input": usage.prompt_tokens}
    return found | ({"output": usage.completion_tokens} if operation in _WRITING else {})


def of_request(request: Request, operation: str, asked: Source, *, stream: bool) -> Attributes:
    """What is known before anybody answers; `asked` is whom the call goes to first."""
    found: Attributes = {"gen_ai.operation.name": operation, "gen_ai.provider.name": _PROVIDERS[asked]}
    if request.model:
        found["gen_ai.request.model"] = request.model
    if stream:
        found["gen_ai.request.stream"] = True
    given = {{"max_new_tokens": "max_tokens"}.get(name, name): value for name, value in request.body.items()}
    return found | {
        f"gen_ai.request.{name}": given[name] for name in _SAMPLING if isinstance(given.get(name), int | float)
    }


def of_server(source: Source, url: str) -> Attributes:
    """Who was asked last: the provider, and its host and port."""
    found: Attributes = {"gen_ai.provider.name": _PROVIDERS[source]}
    parts = urlsplit(url)
    if parts.hostname:
        found["server.address"] = parts.hostname
        found["server.port"] = parts.port or _PORTS.get(parts.scheme, _PORTS["http"])
    return found


def of_answer(operation: str, origin: Origin, usage: Usage, finish_reason: str) -> Attributes:
    """Who answered, and what it took."""
    found = of_server(origin.source, origin.node) | {
        "gen_ai.response.model": origin.model,
        "gen_ai.response.id": origin.request_id,
        "npu.device": origin.device or "",
        "npu.attempts": len(origin.attempts),
    }
    found |= {f"gen_ai.usage.{kind}_tokens": count for kind, count in tokens_of(operation, usage).items()}
    if finish_reason:
        found["gen_ai.response.finish_reasons"] = [finish_reason]
    return found
