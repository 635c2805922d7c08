"""An answer that matches an expression or a grammar of the caller's own, instead of a JSON schema."""

from __future__ import annotations

from typing import Literal

import msgspec

from worker_node.errors import BadRequest, UnsupportedParameter
from worker_node.grammars.budget import Budget
from worker_node.grammars.ebnf import Rules
from worker_node.grammars.gbnf import grammar_to_ebnf
from worker_node.grammars.gbnf_syntax import GrammarRefused
from worker_node.grammars.pattern import PatternRefused, pattern_to_ebnf
from worker_node.grammars.refusals import NothingAdmitted
from worker_node.grammars.writing import AS_IT_IS


class GivenText(msgspec.Struct, frozen=True):
    """A regular expression that the whole answer matches, or a grammar; not checked yet, and its place."""

    kind: Literal["regex", "grammar"]
    source: str
    where: str


def add_text(rules: Rules, given: GivenText, budget: Budget) -> str:
    """Add what is given to the rules of a grammar; returns the rule, or expression, of its texts.

    Raises BadRequest, which names the part.
    """
    where = given.where
    try:
        if given.kind == "grammar":
            return grammar_to_ebnf(given.source, rules, budget.spend)
        expression = pattern_to_ebnf(given.source, rules, budget.spend, AS_IT_IS)
    except PatternRefused as error:
        raise UnsupportedParameter(f"{where}: the expression cannot be enforced: {error}", param=where) from None
    except GrammarRefused as error:
        raise UnsupportedParameter(f"{where}: the grammar cannot be enforced: {error}", param=where) from None
    except RecursionError:
        raise BadRequest(f"{where}: it is nested too deeply", param=where) from None
    if expression is None:
        raise NothingAdmitted(where, "no text matches it")
    return expression
