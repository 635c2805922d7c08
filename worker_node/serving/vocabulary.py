"""Checks of token ids that came in place of text."""

from __future__ import annotations

from collections.abc import Sequence

from worker_node.core.errors import BadRequest


def check_ids(ids: Sequence[int], vocabulary: int, param: str | None = None) -> None:
    """Raise BadRequest unless there is at least one token id and each is one of the vocabulary's."""
    if not ids:
        raise BadRequest("a list of token ids is empty", param=param)
    if min(ids) < 0 or max(ids) >= vocabulary:
        raise BadRequest(
            f"a token id is not in the model's vocabulary of {vocabulary}; use the model's own tokenizer", param=param
        )
