"""The examples in the prompts of the JSON jobs, and whether an answer repeats one instead of reading the text.

Small models copy. So the examples are about things with made-up names, which no text speaks of by chance: an answer
with such a name, or with a run of words of the example, is a copy unless the text itself has it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

# Shorter runs of words occur by chance.
_RUN = 4
_WORD = re.compile(r"\w+")

NOTIFICATION: Mapping[str, Any] = {
    "severity": "warning",
    "category": "storage",
    "summary": "The Quorvane backup disk is 91 % full.",
    "action_needed": True,
}
MEMORY: Mapping[str, Any] = {
    "candidates": ["Velmira prefers juniper tea to coffee."],
    "notes": "One preference of Velmira was stated.",
}
_INVENTED = frozenset({"quorvane", "velmira"})


def shown(example: Mapping[str, Any]) -> str:
    """The line of a prompt that shows an example."""
    return f"Example: {json.dumps(example)}"


def repeats(answer: Mapping[str, Any], example: Mapping[str, Any], text: str) -> bool:
    """Whether an answer repeats what the example says and the text does not."""
    own = _words(text)
    own_runs = set(_runs(own))
    copied_runs = {run for part in _texts(example) for run in _runs(_words(part))} - own_runs
    copied_words = _INVENTED - set(own)
    return any(
        not copied_words.isdisjoint(words) or not copied_runs.isdisjoint(_runs(words))
        for words in map(_words, _texts(answer))
    )


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _texts(part)
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _runs(words: list[str]) -> Iterator[tuple[str, ...]]:
    return (tuple(words[i : i + _RUN]) for i in range(len(words) - _RUN + 1))
