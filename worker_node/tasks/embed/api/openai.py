"""POST /v1/embeddings."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import orjson
from aiohttp import web
from pydantic import Field

from worker_node.api.body import DialectBody, note_ignored, read_body
from worker_node.api.context import request_context
from worker_node.api.keys import STATE
from worker_node.api.leniency import Table, Unsupported, hints
from worker_node.api.middleware import inference
from worker_node.api.openai.accounting import ACCOUNTING
from worker_node.core.errors import BadRequest, UnsupportedParameter
from worker_node.tasks.embed.api.headers import embedding_headers
from worker_node.tasks.embed.api.vectors import embedding_objects
from worker_node.tasks.embed.serving.forms import INPUT_TYPES
from worker_node.tasks.embed.serving.model import EmbeddingModel, embedding_model
from worker_node.tasks.embed.serving.requests import EmbeddingRequest
from worker_node.tasks.embed.serving.service import embed

Ids = Annotated[list[int], Field(min_length=1)]


EMBEDDINGS: Table = {
    **ACCOUNTING,
    **hints("embd_normalize"),
    "add_special_tokens": Unsupported("send token ids for a text without special tokens", (True,)),
    "messages": Unsupported("send the text as input"),
}


class OpenAIEmbeddingsBody(DialectBody):
    """Body of POST /v1/embeddings. Token ids are those of the model's own tokenizer, special tokens included."""

    rules: ClassVar[Table] = EMBEDDINGS

    model: str
    input: str | Annotated[list[str], Field(min_length=1)] | Ids | Annotated[list[Ids], Field(min_length=1)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    truncate: bool | Literal["NONE", "END"] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    normalize: bool | None = None
    input_type: str | None = None

    def truncates(self, limit: int) -> bool:
        """Whether a text of more than `limit` tokens, the model's limit, is cut at its end. Raises BadRequest."""
        most = self.truncate_prompt_tokens
        if most is not None and 0 <= most < limit:
            raise UnsupportedParameter(
                f"truncate_prompt_tokens: texts can be cut to the model's {limit} tokens only; send -1 for that",
                param="truncate_prompt_tokens",
            )
        return most is not None or self.truncate in (True, "END")

    def texts(self) -> tuple[str | tuple[int, ...], ...]:
        """The texts, of which one may stand without a list around it."""
        if isinstance(self.input, str):
            return (self.input,)
        texts: list[str | tuple[int, ...]] = []
        ids: list[int] = []
        for item in self.input:
            if isinstance(item, int):
                ids.append(item)
            else:
                texts.append(item if isinstance(item, str) else tuple(item))
        return (tuple(ids),) if ids else tuple(texts)


def routes() -> list[web.RouteDef]:
    """The routes of this file."""
    return [web.post("/v1/embeddings", inference(_embeddings))]


async def _embeddings(request: web.Request) -> web.Response:
    node = request[STATE].node
    context = request_context(request)
    body = await read_body(request, OpenAIEmbeddingsBody)
    texts = body.texts()
    if len(texts) > node.settings.max_texts:
        raise BadRequest(
            f"{len(texts)} inputs in one request; at most {node.settings.max_texts} are taken", param="input"
        )
    model = await embedding_model(node.manager, body.model, context.deadline)
    if body.normalize is False:
        raise UnsupportedParameter(
            f"normalize: the vectors of {model.id} are as it was trained to give them; leave it out", param="normalize"
        )
    truncate = body.truncates(model.tokenizer.limit)
    wanted = EmbeddingRequest(
        context,
        texts,
        body.model,
        truncate=truncate,
        input_type=_input_type(request, body.input_type, model),
        dimensions=body.dimensions,
    )
    reply = await embed(node.services, wanted)
    usage = {"prompt_tokens": reply.usage.prompt_tokens, "total_tokens": reply.usage.prompt_tokens}
    head = orjson.dumps({"object": "list", "model": reply.route.model, "usage": usage})[:-1]
    items = await embedding_objects(reply.vectors, as_base64=body.encoding_format == "base64")
    return web.Response(
        body=head + b',"data":[' + items + b"]}",
        content_type="application/json",
        charset="utf-8",
        headers=embedding_headers(reply),
    )


def _input_type(request: web.Request, given: str | None, model: EmbeddingModel) -> str | None:
    """The input type, or None where it has no effect: the model has no prompts, or it is for another use than search.

    The reply then lists it as ignored; a node that is set to refuse such fields leaves it for the error.
    """
    useless = given is not None and (not model.prompts or given not in INPUT_TYPES)
    if not useless or request[STATE].node.settings.unknown_fields == "reject":
        return given
    note_ignored(request, "input_type")
    return None
