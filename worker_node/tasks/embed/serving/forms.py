"""What a request may ask of an embedding model beside its vectors: its prompts, and vectors cut to a smaller size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from worker_node.core.errors import BadRequest, UnsupportedParameter
from worker_node.tasks.embed.serving.model import EmbeddingModel

# What a text is, by the names that callers use for it.
INPUT_TYPES = {
    "query": "query",
    "search_query": "query",
    "document": "document",
    "search_document": "document",
    "passage": "document",
}


def with_prompt(
    model: EmbeddingModel, texts: Sequence[str | tuple[int, ...]], input_type: str | None
) -> Sequence[str | tuple[int, ...]]:
    """The texts with the model's prompt for `input_type` before each; None leaves them as they are.

    Raises UnsupportedParameter (the model has no prompts), BadRequest (another type, or token ids).
    """
    if input_type is None:
        return texts
    kind = INPUT_TYPES.get(input_type)
    if kind is None:
        raise BadRequest(f"input_type is one of {', '.join(INPUT_TYPES)}, not {input_type[:64]!r}", param="input_type")
    if not model.prompts:
        raise UnsupportedParameter(
            f"input_type: {model.id} declares no prompts, it embeds queries and documents alike; leave it out",
            param="input_type",
        )
    prompt = model.prompts[kind]
    prompted: list[str | tuple[int, ...]] = []
    for text in texts:
        if not isinstance(text, str):
            raise BadRequest("input_type: token ids are taken as they stand; send texts", param="input_type")
        prompted.append(prompt + text)
    return prompted


def check_dimensions(model: EmbeddingModel, dimensions: int | None) -> None:
    """Raises UnsupportedParameter for vectors of a size that the model does not declare."""
    if dimensions in (None, model.dimensions) or dimensions in model.matryoshka:
        return
    if model.matryoshka:
        sizes = ", ".join(map(str, (*model.matryoshka, model.dimensions)))
        raise UnsupportedParameter(f"dimensions: {model.id} can give {sizes}", param="dimensions")
    raise UnsupportedParameter(
        f"dimensions: the vectors of {model.id} have {model.dimensions} and it was not trained to be cut",
        param="dimensions",
    )


def space_of(model: EmbeddingModel, dimensions: int | None) -> str:
    """The vector space of vectors of that size: `SPACE-DIMENSIONS` where they are cut. The client expects this name."""
    return model.space if dimensions in (None, model.dimensions) else f"{model.space}-{dimensions}"


def cut(vectors: npt.NDArray[np.float32], dimensions: int | None) -> npt.NDArray[np.float32]:
    """The first `dimensions` numbers of each row, at unit length again; a row of zeros stays one."""
    if dimensions is None or dimensions >= vectors.shape[1]:
        return vectors
    head = vectors[:, :dimensions]
    norms = np.linalg.norm(head, axis=1, keepdims=True)
    # Not in place: the rows may be the cache's, or the engine's bytes.
    return (head / np.where(norms > 0, norms, 1)).astype(np.float32, copy=False)
