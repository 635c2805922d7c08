"""What a chaos run asks of a reranker, and the right answers: BERT in plain numpy over the published tensors."""

import json
import math
import random
from dataclasses import dataclass

import numpy as np
import tokenizers
from safetensors.numpy import load_file

from tests.support.numpy_bert import bert_logits

RERANKER = "tiny-ranker"
_WORDS = ["a", "b", "c", "d", "e", "f", "g", "h", "the", "cat", "sat", "on", "mat"]
_QUERIES, _DOCUMENTS = 6, 24
# The nodes compute in float32, the reference in float64.
_TOLERANCE = 1e-3


@dataclass
class Rankings:
    """`scores` by query and document."""

    queries: list
    documents: list
    scores: dict

    def check(self, query, documents, ranked):
        """None, or what is wrong with the (index, score) pairs of a reply, the most relevant first."""
        if sorted(index for index, _ in ranked) != list(range(len(documents))):
            return f"ranked {[index for index, _ in ranked]} of {len(documents)} documents"
        if [score for _, score in ranked] != sorted((score for _, score in ranked), reverse=True):
            return "not the most relevant first"
        wanted = np.array([self.scores[query, documents[index]] for index, _ in ranked])
        worst = np.abs(wanted - np.array([score for _, score in ranked])).max()
        # Written so that NaN fails.
        return None if worst <= _TOLERANCE else f"a score is {worst:.4f} from the reference"


def rankings(seed, directory):
    """The questions of a seed and their right scores. `directory`: the published form."""
    rng = random.Random(seed)

    def some(count, shortest, longest):
        return list(
            dict.fromkeys(" ".join(rng.choices(_WORDS, k=rng.randint(shortest, longest))) for _ in range(count))
        )

    queries, documents = some(_QUERIES, 2, 5), some(_DOCUMENTS, 1, 12)
    tensors = load_file(directory / "model.safetensors")
    heads = json.loads((directory / "config.json").read_text())["num_attention_heads"]
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    scores = {}
    for query in queries:
        for document in documents:
            encoding = tokenizer.encode(query, document)
            scores[query, document] = 1 / (
                1 + math.exp(-bert_logits(tensors, heads, encoding.ids, encoding.type_ids)[0])
            )
    return Rankings(queries, documents, scores)
