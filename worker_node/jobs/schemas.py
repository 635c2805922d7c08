"""The JSON that two of the jobs answer with, in sizes that a budget of tokens can close."""

from __future__ import annotations

from typing import Any

from worker_node.structured_output.ebnf import JSON_RULES

Schema = dict[str, Any]

# Braces, keys, quotes and the fixed values of each form, in tokens, with room to spare.
_NOTIFICATION_FRAME = 40
_MEMORY_FRAME = 24
# English has about four characters a token; small vocabularies and other scripts have fewer.
_CHARACTERS_PER_TOKEN = 2
_SHORTEST = 16

SEVERITIES = ("info", "warning", "critical")


def notification(budget: int) -> Schema:
    """severity, category, summary, action_needed; `budget` is the answer's limit in tokens."""
    return _object(
        severity={"enum": list(SEVERITIES)},
        category=_text(20),
        summary=_text(_characters(budget - _NOTIFICATION_FRAME, 200)),
        action_needed={"type": "boolean"},
    )


def memory_candidate(budget: int) -> Schema:
    """candidates (proposals, never stored by the node) and notes; `budget` is the answer's limit in tokens."""
    room = _characters(budget - _MEMORY_FRAME, 500)
    most = max(1, min(4, room // 60))
    notes = max(_SHORTEST, min(100, room // 4))
    return _object(
        candidates={
            "type": "array",
            "items": _text(max(_SHORTEST, (room - notes) // most)),
            "maxItems": most,
        },
        notes=_text(notes, least=0),
    )


def compact(grammar: str) -> str:
    """The grammar with at most one blank where JSON allows more: each would be a token of the budget."""
    rule = f"ws ::= {JSON_RULES['ws']}\n"
    if rule not in grammar:
        raise ValueError("the grammar has no rule for blanks")
    return grammar.replace(rule, 'ws ::= " "?\n')


def _object(**properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _text(most: int, least: int = 1) -> Schema:
    return {"type": "string", "minLength": least, "maxLength": most}


def _characters(tokens: int, most: int) -> int:
    return max(_SHORTEST, min(most, tokens * _CHARACTERS_PER_TOKEN))
