"""Making an input fit the NPU's static prompt: 6000 characters may be more tokens than it holds."""

from __future__ import annotations

from collections.abc import Callable

from worker_node.bounded.jobs import excerpt


def fit(text: str, count: Callable[[str], int], limit: int) -> tuple[str, int]:
    """Return the text, or the longest excerpt of it that has at most `limit` tokens, and how many characters are kept.

    `count` gives the tokens of the whole prompt for a text, and grows with it by and large: the excerpt found fits, and
    a slightly longer one might.
    """
    if count(text) <= limit:
        return text, len(text)
    low, high = 0, len(text) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if count(excerpt(text, middle)) <= limit:
            low = middle
        else:
            high = middle - 1
    return excerpt(text, low), low
