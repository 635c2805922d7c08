"""Reading a reply of the cloud. The SDK does not validate: any field may be missing or of any type."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeGuard

from backend_client.results import Usage


class NotAnAnswer(ValueError):
    """The cloud answered 200 with something that is no answer; the text says what, and quotes nothing."""


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Read what the SDK handed over; it does not validate. Raises NotAnAnswer for what is missing or misshapen."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise NotAnAnswer(f"{what} ({type(error).__name__})") from None


def text_in(field: object) -> str:
    """A text, "" where the field is null. Raises TypeError."""
    if not isinstance(field, str | None):
        raise TypeError("not a text")
    return field or ""


def usage_in(field: object, *, embedding: bool = False) -> Usage | None:
    """The tokens that a reply says it used; None if it does not say, or says what cannot be.

    None is counted at the request's bound, so that no reply can lower what was spent.
    """
    prompt = getattr(field, "prompt_tokens", None)
    completion = 0 if embedding else getattr(field, "completion_tokens", None)
    return Usage(prompt, completion) if _is_count(prompt) and _is_count(completion) else None


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and value >= 0
