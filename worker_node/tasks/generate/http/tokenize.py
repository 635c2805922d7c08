"""POST /tokenize and /detokenize, in the forms of vLLM and llama.cpp's server."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated, Any, ClassVar

from aiohttp import web
from pydantic import Field

from worker_node.core.errors import BadRequest
from worker_node.http.body import DialectBody, Table, Unsupported, read_body
from worker_node.http.context import NODE, request_context
from worker_node.http.replies import Reply, json_response
from worker_node.http.routes import JSON, ApiOperation
from worker_node.manager.served import ServedModel
from worker_node.tasks.generate.building import GenerationModel
from worker_node.tasks.generate.chat_tokenizer import LargeTexts
from worker_node.tasks.generate.http.conversation import NO_TEMPLATE, RenderingBody, Turn, conversation
from worker_node.tasks.generate.prompting import generation_model

_MAX_TOKENS = 1_000_000
_RULES: Table = {"chat_template": Unsupported(NO_TEMPLATE), "tools": Unsupported("send them with a request")}


class TokenizeBody(RenderingBody):
    """A `prompt`, or the `messages` of a conversation.

    llama.cpp calls the prompt `content`, and adds special tokens with `add_special` only.
    """

    rules: ClassVar[Table] = _RULES

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Annotated[Turn, Field(discriminator="role")]], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    content: str | None = None
    add_special: bool | None = None
    with_pieces: bool | None = None

    def text(self) -> tuple[str, bool] | None:
        """The text, and whether it gets special tokens; None for a conversation. Raises BadRequest."""
        if self.content is not None and self.prompt is None and self.messages is None:
            return self.content, bool(self.add_special)
        if (self.prompt is None) == (self.messages is None) or self.content is not None:
            raise BadRequest("send either prompt or messages", param="prompt")
        return None if self.prompt is None else (self.prompt, self.add_special_tokens is not False)


class DetokenizeBody(DialectBody):
    """Body of POST /detokenize. Special tokens are text too."""

    rules: ClassVar[Table] = _RULES

    model: str | None = None
    tokens: Annotated[list[int], Field(max_length=_MAX_TOKENS)]


async def _tokenize(request: web.Request) -> web.Response:
    body = await read_body(request, TokenizeBody)
    node, deadline = request.app[NODE], request_context(request).deadline
    given = body.text()
    named = None if body.model is None else await node.manager.resolve(body.model, deadline)
    if named is not None and not isinstance(named, GenerationModel):
        if given is None or body.with_pieces or body.return_token_strs:
            raise BadRequest(
                f"model {named.id} does not chat: send it a prompt, and leave out with_pieces and return_token_strs",
                param="model",
            )
        return json_response(_counted(named, await named.token_ids(given[0], special=given[1], deadline=deadline)))
    model = await generation_model(node.manager, body.model, deadline)
    texts = node.services.parts.of(LargeTexts)
    if given is None:
        messages = conversation(body.messages or [])
        if image := next((image for turn in messages for image in turn.images), None):
            raise BadRequest.at(image.where, "only text is tokenized here; leave images out")
        text = await texts.render(model.tokenizer, messages, body.rendering(), deadline=deadline)
        given = text, bool(body.add_special_tokens)
    tokens = await texts.encode(model.tokenizer, given[0], special=given[1], deadline=deadline)
    reply = _counted(model, tokens)
    if body.with_pieces:
        reply["tokens"] = [{"id": token, "piece": _piece(model.tokenizer.piece(token))} for token in tokens]
    if body.return_token_strs:
        decode = partial(model.tokenizer.decode, skip_special_tokens=False)
        reply["token_strs"] = await asyncio.to_thread(lambda: [decode([token]) for token in tokens])
    return json_response(reply)


def _counted(model: ServedModel, tokens: list[int]) -> dict[str, Any]:
    longest = max(place.total_limit for place in model.placements)
    return {"count": len(tokens), "max_model_len": longest, "tokens": tokens}


async def _detokenize(request: web.Request) -> web.Response:
    body = await read_body(request, DetokenizeBody)
    deadline = request_context(request).deadline
    tokenizer = (await generation_model(request.app[NODE].manager, body.model, deadline)).tokenizer
    ids = tokenizer.check_ids(body.tokens, "tokens") if body.tokens else []
    text = await asyncio.to_thread(tokenizer.decode, ids, skip_special_tokens=False)
    return json_response({"prompt": text, "content": text})


def _piece(data: bytes) -> str | list[int]:
    """A token's text; its bytes where they are no text of their own."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


class Tokenized(Reply):
    count: int
    max_model_len: int
    tokens: list[int] | list[dict[str, Any]]


class Detokenized(Reply):
    """POST /detokenize: the text, as vLLM and llama.cpp's server name it."""

    prompt: str
    content: str


OPERATIONS = (
    ApiOperation("post", "/tokenize", _tokenize, "vLLM: tokens of a prompt", {JSON: Tokenized}, TokenizeBody),
    ApiOperation("post", "/detokenize", _detokenize, "vLLM: text of tokens", {JSON: Detokenized}, DetokenizeBody),
)
