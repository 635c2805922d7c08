"""Errors as the native API renders them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import orjson
from aiohttp import web

from worker_node.core.errors import ModelNotFound, NodeError, Overloaded
from worker_node.http.leniency import Table, Unsupported, hints


def error_body(error: NodeError) -> bytes:
    """The JSON of an error: `{"error": {"message", "type", "code", "param"}}`."""
    return orjson.dumps({"error": describe(error)})


def describe(error: NodeError) -> dict[str, str | None]:
    """The four fields of an error."""
    return {"message": error.message, "type": error.type, "code": error.code, "param": error.param}


def retry_headers(error: NodeError) -> dict[str, str]:
    """`Retry-After` (whole seconds, rounded up) and `retry-after-ms`, where another try may help."""
    if error.retry_after is None:
        return {}
    return {
        "Retry-After": str(max(1, math.ceil(error.retry_after))),
        "retry-after-ms": str(max(1, round(error.retry_after * 1000))),
    }


def error_response(error: NodeError, fields: object = None) -> web.Response:
    """The reply to a request that failed; `fields` is what stands under `error` where a dialect has its own form."""
    return web.Response(
        status=error.status,
        body=error_body(error) if fields is None else orjson.dumps({"error": fields}),
        content_type="application/json",
        charset="utf-8",
        headers=retry_headers(error),
    )


# Errors as OpenAI's clients read them: the native form, with OpenAI's codes and its word on retrying.

_CODES = {"overloaded": "rate_limit_exceeded"}


def describe_error(error: NodeError) -> dict[str, str | None]:
    """The four fields of an error, with the code that OpenAI has for it."""
    fields = describe(error)
    return fields | {"code": _CODES.get(error.code, error.code)}


def openai_error_response(error: NodeError) -> web.Response:
    """The reply to a request that failed.

    `x-should-retry` keeps the SDK, which would retry every 408, 409, 429 and 5xx, from repeating what cannot succeed.
    """
    response = error_response(error, describe_error(error))
    response.headers["x-should-retry"] = "true" if error.retry_after is not None else "false"
    return response


# Errors as Ollama's clients read them: `{"error": "…"}`.

BUSY = "server busy, please try again. maximum pending requests exceeded"


def message(error: NodeError) -> str:
    """The text of an error; clients know a full queue by its wording."""
    return BUSY if isinstance(error, Overloaded) else error.message


def not_found(name: str) -> ModelNotFound:
    """The error for a name that no model has, in the words that clients look for before they pull."""
    return ModelNotFound(f"model {name[:200]!r} not found", param="model")


def ollama_error_response(error: NodeError) -> web.Response:
    """The reply to a request that failed. A full queue is 503 here."""
    return web.Response(
        status=503 if isinstance(error, Overloaded) else error.status,
        body=orjson.dumps({"error": message(error)}),
        content_type="application/json",
        charset="utf-8",
        headers=retry_headers(error),
    )


# The `options` of Ollama's dialect that this node does not implement.

_MIROSTAT = "this engine has no Mirostat sampling"

# On memory and threads, which this node uses in its own way.
OPTIONS: Table = {
    **hints(
        "draft_num_predict",
        "embedding_only",
        "f16_kv",
        "logits_all",
        "low_vram",
        "main_gpu",
        "num_batch",
        "num_gpu",
        "num_gqa",
        "num_keep",
        "num_thread",
        "numa",
        "rope_frequency_base",
        "rope_frequency_scale",
        "use_mlock",
        "use_mmap",
        "vocab_only",
    ),
    "mirostat": Unsupported(_MIROSTAT),
    "mirostat_eta": Unsupported(_MIROSTAT),
    "mirostat_tau": Unsupported(_MIROSTAT),
    "repeat_last_n": Unsupported("this engine's penalties count the whole answer", (-1,)),
    "tfs_z": Unsupported("this engine has no tail-free sampling", (1,)),
    "typical_p": Unsupported("this engine has no typical sampling", (1,)),
}


# Fields of OpenAI's dialect that have no effect here, in requests of any task.
#
# Sources: the API references of OpenAI, vLLM, llama.cpp's server and OpenRouter.

# They change where or for whom a request is accounted, stored or routed, never what the answer is.
ACCOUNTING = hints(
    "cache_control",
    "metadata",
    "moderation",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "user",
    # OpenRouter's
    "models",
    "provider",
    "route",
    "session_id",
    "trace",
    "transforms",
    "usage",
    # vLLM's
    "cache_salt",
    "kv_transfer_params",
    "mm_processor_kwargs",
    "request_id",
    "vllm_xargs",
    # llama.cpp's
    "cache_prompt",
    "id_slot",
    "n_cache_reuse",
    "n_keep",
    "return_progress",
    "slot_id",
    "sse_ping_interval",
    "timings_per_token",
)


# Maps URLs to the form of their errors, and knows the names of request fields.
#
# A request that never reached a handler (no such URL, wrong key, too large) is answered in the form that the clients of
# that part of the API understand, so the form follows from the path alone.

OPENAI_PREFIX = "/v1/"
# OpenVINO Model Server has OpenAI's routes there.
OVMS_PREFIX = "/v3/"

Renderer = Callable[[NodeError], web.Response]

# Names that a metric may have whatever the task.
SHARED_FIELDS = frozenset((*OPTIONS, *ACCOUNTING))

_BY_PREFIX: tuple[tuple[str, Renderer], ...] = (
    (OPENAI_PREFIX, openai_error_response),
    (OVMS_PREFIX, openai_error_response),
    ("/api/", ollama_error_response),
)


def also_below_v3(routes: Iterable[web.RouteDef]) -> list[web.RouteDef]:
    """The routes, and those of OpenAI's dialect once more where clients of OpenVINO Model Server look for them."""
    given = list(routes)
    return given + [
        web.RouteDef(route.method, OVMS_PREFIX + route.path.removeprefix(OPENAI_PREFIX), route.handler, route.kwargs)
        for route in given
        if route.path.startswith(OPENAI_PREFIX)
    ]


def renderer(path: str) -> Renderer:
    """The function that makes a reply of an error at this path."""
    return next((render for prefix, render in _BY_PREFIX if path.startswith(prefix)), error_response)
