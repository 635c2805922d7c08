"""The whole form of an answer: JSON that matches a schema, calls of tools, either of them, or a text.

Each schema is a document of its own: a `$ref` in a tool's parameters means a part of that tool's schema, and two tools
may define different things under one name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from worker_node.errors import BadRequest, UnsupportedParameter
from worker_node.structured_output.cost import QUICK_STEPS, Budget, OutOfSteps, check_cost
from worker_node.structured_output.ebnf import AS_IT_IS, Rules, json_literal, literal
from worker_node.structured_output.grammar import GrammarRefused, grammar_term
from worker_node.structured_output.keywords import NothingAdmitted
from worker_node.structured_output.pattern import PatternRefused, pattern_term, term_to_ebnf
from worker_node.structured_output.schema import add_schema

# How models that write calls without tags begin one.
_OPENINGS = ("{", "{ ", "{\n", "{\n  ", "{\n    ")
_COLONS = (": ", ":")


class FormPart(msgspec.Struct, frozen=True):
    """A JSON schema, not checked yet, and where it stands in the request.

    Where it is not `strict`, keywords that cannot be enforced are dropped.
    """

    schema: Any
    where: str
    strict: bool = True


class Compiled(NamedTuple):
    """A grammar, and the keywords of its schemas that it does not enforce, by their places in the request."""

    grammar: str
    dropped: tuple[str, ...] = ()

    @classmethod
    def read(cls, text: str) -> Compiled:
        """The two out of what `compile_form` returned."""
        grammar, _, dropped = text.partition(_DROPPED)
        return cls(grammar, tuple(msgspec.json.decode(dropped)) if dropped else ())


# A comment at the end of a grammar: the two travel, and are kept, as one text.
_DROPPED = "# dropped "


class GivenText(msgspec.Struct, frozen=True):
    """A regular expression that the whole answer matches, or a grammar; not checked yet, and its place."""

    kind: Literal["regex", "grammar"]
    source: str
    where: str


class CallForm(msgspec.Struct, frozen=True):
    """How calls are written: one object in JSON, with the arguments under the key `arguments`.

    `tools` are the parameters of each tool, by name. Between `tags` the object stands as it is or, `listed`, in a list.
    Without tags the answer is one object. `several` calls may follow each other. With `optional` the answer is any
    text, in which calls match from where they begin; arguments whose schema cannot be enforced are any object then.
    """

    tools: dict[str, FormPart]
    arguments: str
    tags: tuple[str, str] | None = None
    listed: bool = False
    several: bool = False
    optional: bool = False


class Form(msgspec.Struct, frozen=True):
    """What an answer may be: JSON that matches the schema of `answer`, `calls`, either of the two, or a `text`."""

    answer: FormPart | None = None
    calls: CallForm | None = None
    text: GivenText | None = None

    @property
    def where(self) -> str:
        """The part of the request that asks for this form."""
        if (part := self.answer or self.text) is not None:
            return part.where
        places = [part.where for part in self.calls.tools.values()] if self.calls is not None else []
        return places[0] if len(places) == 1 else "tools"


def compile_form(form: Any, steps: int | None = None) -> str:
    """Return the grammar of a form, which may be given as plain values. `steps` bounds the work.

    Where keywords were dropped, a comment at the end names them: see `Compiled.read`.

    Raises BadRequest for a schema that is none, UnsupportedParameter for one that cannot be enforced or is over a
    bound; both name the part.
    """
    form = msgspec.convert(form, Form)
    budget = Budget(form.where) if steps is None else Budget(form.where, steps)
    rules = Rules()
    kinds = []
    dropped: dict[str, None] = {}
    if form.text is not None:
        kinds.append(_text(rules, form.text, budget))
    if form.answer is not None:
        kinds.append(_added(rules, form.answer, form.answer.schema, budget, dropped))
    if form.calls is not None and form.calls.optional:
        return _written(_optional_calls(form.calls, budget, dropped, form.where), dropped)
    if form.calls is not None:
        kinds.append(_calls(rules, form.calls, budget, dropped))
    # A call between tags begins with another character than any JSON value.
    grammar = rules.text(kinds[0] if len(kinds) == 1 else rules.add("choice", " | ".join(kinds)))
    check_cost(grammar, form.where)
    return _written(grammar, dropped)


def _text(rules: Rules, given: GivenText, budget: Budget) -> str:
    where = given.where
    try:
        term = grammar_term(given.source) if given.kind == "grammar" else pattern_term(given.source, search=False)
        expression = term_to_ebnf(term, rules, budget.spend, AS_IT_IS)
    except (PatternRefused, GrammarRefused) as error:
        kind = "grammar" if given.kind == "grammar" else "expression"
        raise UnsupportedParameter(f"{where}: the {kind} cannot be enforced: {error}", param=where) from None
    except RecursionError:
        raise BadRequest(f"{where}: it is nested too deeply", param=where) from None
    if expression is None:
        raise NothingAdmitted(where, "no text matches it")
    return expression


def _written(grammar: str, dropped: dict[str, None]) -> str:
    return grammar + (_DROPPED + msgspec.json.encode(list(dropped)).decode() if dropped else "")


def _added(rules: Rules, part: FormPart, schema: Any, budget: Budget, dropped: dict[str, None]) -> str:
    return add_schema(rules, schema, part.where, budget, part.schema, None if part.strict else dropped)


def compile_form_if_quick(form: Any) -> str | None:
    """The same within `QUICK_STEPS`; None for what takes longer."""
    try:
        return compile_form(form, QUICK_STEPS)
    except OutOfSteps:
        return None


def _optional_calls(form: CallForm, budget: Budget, dropped: dict[str, None], where: str) -> str:
    """The grammar of text with calls. What is over a bound with the schemas of all tools is left to any objects."""
    try:
        return _text_with_calls(form, budget, dropped, where)
    except OutOfSteps:
        raise
    except BadRequest:
        dropped |= dict.fromkeys(part.where for part in form.tools.values())
        anything = {name: FormPart({}, part.where, part.strict) for name, part in form.tools.items()}
        return _text_with_calls(msgspec.structs.replace(form, tools=anything), budget, dropped, where)


def _text_with_calls(form: CallForm, budget: Budget, dropped: dict[str, None], where: str) -> str:
    """Text that is free until a call begins in it. The runtime watches for the beginnings itself (`TagDispatch`), so
    free text costs no tests of the vocabulary."""
    rules = Rules()
    if form.tags is not None:
        opening, closing = form.tags
        inside = rules.add("inside", f"ws {_between_tags(rules, form, budget, dropped)} ws {literal(closing)}")
        beginnings = [(opening, inside)]
    else:
        key = json_literal(form.arguments)
        beginnings = [
            (beginning, rest)
            for name, part in form.tools.items()
            for arguments in [_arguments(rules, part, form, budget, dropped)]
            for rest in [rules.add("rest", f'ws "," ws {key} ws ":" ws {arguments} ws "}}"')]
            for beginning in _call_beginnings(name)
        ]
    grammar = rules.text(rules.add("choice", " | ".join(dict.fromkeys(rule for _, rule in beginnings))))
    check_cost(grammar, where)
    return _free_until(grammar, beginnings, several=form.several)


def _call_beginnings(name: str) -> list[str]:
    """The spellings of a call in bare JSON up to the tool's name."""
    written = [f'{opening}"name"{colon}' for opening in _OPENINGS for colon in _COLONS]
    written += [f'{{"type"{colon}"function",{blank}"name"{colon}' for colon, blank in ((": ", " "), (":", ""))]
    return [start + json.dumps(name, ensure_ascii=False) for start in written]


def _free_until(grammar: str, calls: Sequence[tuple[str, str]], *, several: bool) -> str:
    """The grammar with another root: any text, in which each beginning is followed by its rule.

    Unless there may be `several` calls, the text ends after the first.
    """
    tags = ", ".join(f"({literal(beginning)}, {rule})" for beginning, rule in calls)
    _, _, rules = grammar.partition("\n")
    return f"root ::= TagDispatch({tags}, loop_after_dispatch={'true' if several else 'false'})\n{rules}"


def _calls(rules: Rules, form: CallForm, budget: Budget, dropped: dict[str, None]) -> str:
    if form.tags is None:
        return _call(rules, form, budget, dropped)
    opening, closing = map(literal, form.tags)
    tagged = rules.add("tagged", f"{opening} ws {_between_tags(rules, form, budget, dropped)} ws {closing}")
    return rules.add("calls", f"{tagged} (ws {tagged})*") if form.several and not form.listed else tagged


def _between_tags(rules: Rules, form: CallForm, budget: Budget, dropped: dict[str, None]) -> str:
    call = _call(rules, form, budget, dropped)
    if not form.listed:
        return call
    more = f'(ws "," ws {call})*' if form.several else ""
    return rules.add("list", f'"[" ws {call} {more} ws "]"')


def _call(rules: Rules, form: CallForm, budget: Budget, dropped: dict[str, None]) -> str:
    calls = [
        rules.add(
            "call",
            f'"{{" ws {json_literal("name")} ws ":" ws {json_literal(name)} ws "," ws {json_literal(form.arguments)} '
            f'ws ":" ws {_arguments(rules, part, form, budget, dropped)} ws "}}"',
        )
        for name, part in form.tools.items()
    ]
    return rules.add("choice", " | ".join(calls))


def _arguments(rules: Rules, part: FormPart, form: CallForm, budget: Budget, dropped: dict[str, None]) -> str:
    try:
        return _added(rules, part, _of_object(part), budget, dropped)
    except OutOfSteps:
        raise
    except BadRequest:
        if not form.optional:
            raise
        dropped[part.where] = None
        return "object"


def _of_object(part: FormPart) -> Any:
    """The schema with the condition that arguments are an object, which parameters need not say."""
    schema = part.schema
    kinds = schema.get("type", "object") if isinstance(schema, dict) else None
    if kinds == "object" or (isinstance(kinds, list) and "object" in kinds):
        # Its references may have been made absolute, so it is referred to and not copied.
        return {"$ref": "#", "type": "object"}
    raise BadRequest(f"{part.where}.type: arguments are an object", param=f"{part.where}.type")
