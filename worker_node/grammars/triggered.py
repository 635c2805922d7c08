"""Text that is free until a call begins in it: from there on the call matches the schema of its tool.

The runtime watches for the beginnings itself (`TagDispatch`), so free text costs no tests of the vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from worker_node.grammars.ebnf import Rules, json_literal, literal

# How models that write calls without tags begin one.
_OPENINGS = ("{", "{ ", "{\n", "{\n  ", "{\n    ")
_COLONS = (": ", ":")


def call_beginnings(name: str) -> list[str]:
    """The spellings of a call in bare JSON up to the tool's name."""
    written = [f'{opening}"name"{colon}' for opening in _OPENINGS for colon in _COLONS]
    written += [f'{{"type"{colon}"function",{blank}"name"{colon}' for colon, blank in ((": ", " "), (":", ""))]
    return [start + json.dumps(name, ensure_ascii=False) for start in written]


def rest_of_call(rules: Rules, arguments: str, key: str) -> str:
    """The rule of what follows the tool's name in a call in bare JSON."""
    return rules.add("rest", f'ws "," ws {json_literal(key)} ws ":" ws {arguments} ws "}}"')


def free_until(grammar: str, calls: Sequence[tuple[str, str]], *, several: bool) -> str:
    """The grammar with another root: any text, in which each beginning is followed by its rule.

    Unless there may be `several` calls, the text ends after the first.
    """
    tags = ", ".join(f"({literal(beginning)}, {rule})" for beginning, rule in calls)
    _, _, rules = grammar.partition("\n")
    return f"root ::= TagDispatch({tags}, loop_after_dispatch={'true' if several else 'false'})\n{rules}"
