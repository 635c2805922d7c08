"""Log probabilities as OpenAI writes them.

The engine tells the probability of the chosen token and of no other. The likeliest one is therefore known only where it
is the one that was chosen: without sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from worker_node.domain import TokenLogprob
from worker_node.errors import UnsupportedParameter


def check_top(count: int, *, temperature: float | None, name: str) -> None:
    """Raise UnsupportedParameter for more alternatives than the engine can name."""
    if count > 1:
        raise UnsupportedParameter(
            f"{name}: the engine tells the probability of the chosen token only, so at most 1", param=name
        )
    if count and temperature:
        raise UnsupportedParameter(
            f"{name}: which token is likeliest is known only without sampling; set temperature to 0", param=name
        )


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
