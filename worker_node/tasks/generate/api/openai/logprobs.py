"""Log probabilities as OpenAI writes them.

The engine tells the probability of the chosen token and of no other. The likeliest one is therefore known only where it
is the one that was chosen: without sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from worker_node.core.types import TokenLogprob


def known_alternatives(temperature: float | None) -> int:
    """How many of the likeliest tokens are known at each place."""
    return 0 if temperature else 1


def chat_logprobs(tokens: Sequence[TokenLogprob], top: int) -> dict[str, Any]:
    """The `logprobs` of a chat choice."""
    return {"content": [{**_entry(token), "top_logprobs": [_entry(token)] * top} for token in tokens], "refusal": None}


def completion_logprobs(tokens: Sequence[TokenLogprob], top: int, offset: int = 0) -> dict[str, Any]:
    """The `logprobs` of a completion choice; `offset` is how many characters came before."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [{token.text: token.logprob} for token in tokens] if top else None,
        "text_offset": offsets,
    }


def _entry(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.utf8)}
