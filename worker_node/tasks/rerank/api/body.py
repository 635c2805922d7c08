"""The body of a reranking request, in the forms of TEI, Cohere and Jina: the field names tell them apart."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from worker_node.api.body import DialectBody
from worker_node.api.leniency import Table, Unsupported, hints
from worker_node.core.errors import BadRequest

_ONE_FIELD = "documents are ranked by their text alone; send the fields that count as one text"
_TEXT_ONLY = "models here rank texts and give scores alone"

# Sources: the API references of Cohere, Jina, vLLM and text-embeddings-inference.
RERANK: Table = {
    **hints("client_name", "max_chunks_per_doc", "mm_processor_kwargs", "priority", "request_id", "user"),
    "rank_fields": Unsupported(_ONE_FIELD, neutral=(["text"],)),
    "return_embeddings": Unsupported(_TEXT_ONLY),
    "truncate_prompt_tokens": Unsupported("documents are cut with max_tokens_per_doc", neutral=(-1,)),
    "truncation_direction": Unsupported("documents are cut at their end", neutral=("Right", "right")),
}


class Document(DialectBody):
    """A document as an object; what it holds beside its text is given back with it."""

    rules: ClassVar[Table] = {}

    text: str


class RerankBody(DialectBody):
    """Body of POST /rerank, /v1/rerank and /v2/rerank: `texts` as for TEI, or `documents` as for Cohere and Jina.

    `truncate` (Jina: `truncation`) false refuses documents that are too long, true cuts them at their end. TEI's form
    refuses by default, the other cuts.
    """

    rules: ClassVar[Table] = RERANK

    query: Annotated[str, Field(min_length=1)]
    model: str | None = None
    documents: list[str | Document] | None = None
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Annotated[int, Field(ge=1)] | None = None
    truncation: bool | None = None
    texts: list[str] | None = None
    raw_scores: bool = False
    return_text: bool = False
    truncate: bool | None = None

    def given(self) -> tuple[str, tuple[str, ...]]:
        """The name of the field that holds the documents, and their texts. Raises BadRequest."""
        if (self.texts is None) == (self.documents is None):
            raise BadRequest(
                "send either documents (as to Cohere and Jina) or texts (as to TEI)",
                param="documents" if self.texts is None else "texts",
            )
        field = "documents" if self.texts is None else "texts"
        items = self.documents if self.texts is None else self.texts
        if not items:
            raise BadRequest(f"{field} is empty; send at least one", param=field)
        return field, tuple(item if isinstance(item, str) else item.text for item in items)

    def cuts(self) -> bool:
        """Whether documents that are too long are cut."""
        wanted = self.truncation if self.truncate is None else self.truncate
        return self.texts is None if wanted is None else wanted
