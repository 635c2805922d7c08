"""What a reply of the cloud says of itself: which model answered, and the tokens that it used. No I/O."""

from __future__ import annotations

import re
from typing import Any

from backend_client._protocol.answers import NotAnAnswer
from backend_client.results import Usage

# What a cloud adds to the name of a model for one of its versions: -2024-08-06, -0613, -001.
_VERSION = re.compile(r"-\d{4}-\d{2}-\d{2}|-\d{3,8}")


def check_model(asked: str, body: Any) -> None:
    """Raise NotAnAnswer for a reply that names another model than the one that was asked, or a version of it."""
    answered = body.get("model") if isinstance(body, dict) else None
    if answered is None or answered == "":
        return
    base = asked.removesuffix("-latest")
    if not isinstance(answered, str) or not (
        answered == asked or (answered.startswith(base) and _VERSION.fullmatch(answered, len(base)))
    ):
        raise NotAnAnswer(f"another model answered than {asked}; name in the settings the one that answers")


def usage_in(body: Any, bound: Usage, text: str = "") -> Usage | None:
    """The tokens that a reply with that text says it used; None if it does not say, or says what cannot be.

    None is counted at the request's `bound`, so that no reply can lower what was spent.
    """
    usage = body.get("usage") if isinstance(body, dict) else None
    usage = usage if isinstance(usage, dict) else {}
    prompt = usage.get("prompt_tokens")
    completion = usage.get("completion_tokens") if bound.completion_tokens else 0
    if type(prompt) is not int or type(completion) is not int:
        return None
    if not 1 <= prompt <= bound.prompt_tokens or not bool(text) <= completion <= bound.completion_tokens:
        return None
    return Usage(prompt, completion)
