"""Which requests have pictures, and whether their model takes them."""

from __future__ import annotations

from worker_node.domain import GenerationRequest, Message, Picture
from worker_node.errors import BadRequest
from worker_node.manager.manager import ModelManager
from worker_node.serving.models import GenerationModel

MAX_PICTURES = 8


def pictures_of(messages: object) -> tuple[Picture, ...]:
    """The pictures of a conversation in their order; none where the prompt is a text or token ids."""
    if not isinstance(messages, tuple):
        return ()
    return tuple(picture for turn in messages if isinstance(turn, Message) for picture in turn.pictures)


def check_pictures(manager: ModelManager, model: GenerationModel, request: GenerationRequest) -> None:
    """Raise BadRequest for pictures that the model does not take, naming a model that does, and for too many."""
    pictures = pictures_of(request.prompt)
    if not pictures:
        return
    where = pictures[0].where
    if model.pictures is None:
        raise BadRequest(f"{where}: {model.id} reads no images; {_instead(manager)}", param=where)
    if len(pictures) > MAX_PICTURES:
        where = pictures[MAX_PICTURES].where
        raise BadRequest(f"{where}: the request has {len(pictures)} images; the bound is {MAX_PICTURES}", param=where)


def _instead(manager: ModelManager) -> str:
    found = [other.id for other in manager.models if isinstance(other, GenerationModel) and other.pictures is not None]
    if found:
        return f"use one of these: {', '.join(found)}"
    return "this node has no vision model (docs/vision.md says how to add one)"
