"""A small retrieval index that never mixes vector spaces: python examples/rag_index.py "your question".

The index keeps the space of its vectors. A query of another space is refused instead of giving wrong neighbours.
"""

import sys
from dataclasses import dataclass, field

import numpy as np

from backend_client.sync import InferenceClient

DOCUMENTS = [
    "The Eiffel Tower is 330 metres tall.",
    "The node listens on port 8081.",
    "Bananas are yellow when they are ripe.",
]


@dataclass
class Index:
    """Texts with unit vectors (float32, n x d) of one space."""

    space: str
    vectors: np.ndarray
    texts: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, client: InferenceClient, texts: list[str]) -> "Index":
        first = client.embed_result(texts[0])
        vectors = client.embed_many(texts, priority="batch", model=first.model)
        return cls(first.space, vectors, list(texts))

    def nearest(self, client: InferenceClient, question: str, count: int = 2) -> list[str]:
        query = client.embed_result(question)
        if query.space != self.space:
            raise ValueError(f"the index has vectors of {self.space}, the query is of {query.space}: build it again")
        best = np.argsort(self.vectors @ np.float32(query.vector))[::-1][:count]
        return [self.texts[row] for row in best]


def answer(client: InferenceClient, index: Index, question: str) -> str:
    context = "\n".join(index.nearest(client, question))
    prompt = f"Answer in one sentence from this context.\n{context}\nQuestion: {question}"
    return client.generate(prompt, max_new_tokens=60, temperature=0).text


if __name__ == "__main__":
    with InferenceClient.from_settings() as client:
        index = Index.of(client, DOCUMENTS)
        question = " ".join(sys.argv[1:]) or "How tall is the Eiffel Tower?"
        print("nearest:", index.nearest(client, question)[0])
        print("answer:", answer(client, index, question))
