"""The whole form of an answer: JSON that matches a schema, calls of tools, either of them, or a text.

Each schema is a document of its own: a `$ref` in a tool's parameters means a part of that tool's schema, and two tools
may define different things under one name.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import msgspec

from worker_node.core.errors import BadRequest, UnsupportedParameter
from worker_node.structured_output.cost import Budget, check_cost
from worker_node.structured_output.ebnf import AS_IT_IS, Rules, json_literal, literal
from worker_node.structured_output.keywords import NothingAdmitted
from worker_node.structured_output.pattern import PatternRefused, pattern_term, term_to_ebnf
from worker_node.structured_output.schema import add_schema

# How models that write calls without tags begin one.
_OPENINGS = ("{", "{ ", "{\n", "{\n  ", "{\n    ")
_COLONS = (": ", ":")


class FormPart(msgspec.Struct, frozen=True):
    """A JSON schema and its place in the request. Unless `strict`, what cannot be enforced is dropped."""

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
    """A regular expression that the whole answer matches, not checked yet, and its place."""

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


def compile_form(form: Any) -> str:
    """Return the grammar of a form, which may be given as plain values.

    Where keywords were dropped, a comment at the end names them: see `Compiled.read`.

    Raises BadRequest for what is not a schema, UnsupportedParameter for one that cannot be enforced or is over a
    bound; both name the part.
    """
    form = msgspec.convert(form, Form)
    writer = _Writer(form.where, Budget(form.where))
    if form.calls is not None and form.calls.optional:
        grammar = writer.text_with_calls(form.calls)
    else:
        kinds = []
        if form.text is not None:
            kinds.append(writer.text(form.text))
        if form.answer is not None:
            kinds.append(writer.values(form.answer, form.answer.schema))
        if form.calls is not None:
            kinds.append(writer.calls(form.calls))
        # A call between tags begins with another character than any JSON value.
        grammar = writer.grammar(kinds)
    return grammar + (_DROPPED + msgspec.json.encode(list(writer.dropped)).decode() if writer.dropped else "")


class _Writer:
    """Writes the rules of one grammar; `dropped` are the places of keywords that it does not enforce."""

    def __init__(self, where: str, budget: Budget) -> None:
        self._where = where
        self._budget = budget
        self._rules = Rules()
        self.dropped: dict[str, None] = {}

    def grammar(self, kinds: list[str]) -> str:
        grammar = self._rules.text(kinds[0] if len(kinds) == 1 else self._rules.add("choice", " | ".join(kinds)))
        check_cost(grammar, self._where)
        return grammar

    def text(self, given: GivenText) -> str:
        where = given.where
        try:
            term = pattern_term(given.source, search=False)
            expression = term_to_ebnf(term, self._rules, self._budget.spend, AS_IT_IS)
        except PatternRefused as error:
            raise UnsupportedParameter.at(where, f"the expression cannot be enforced: {error}") from None
        except RecursionError:
            raise BadRequest.at(where, "it is nested too deeply") from None
        if expression is None:
            raise NothingAdmitted(where, "no text matches it")
        return expression

    def values(self, part: FormPart, schema: Any) -> str:
        dropped = None if part.strict else self.dropped
        return add_schema(self._rules, schema, part.where, self._budget, part.schema, dropped)

    def calls(self, form: CallForm) -> str:
        if form.tags is None:
            return self._call(form)
        opening, closing = map(literal, form.tags)
        tagged = self._rules.add("tagged", f"{opening} ws {self._between_tags(form)} ws {closing}")
        return self._rules.add("calls", f"{tagged} (ws {tagged})*") if form.several and not form.listed else tagged

    def _between_tags(self, form: CallForm) -> str:
        call = self._call(form)
        if not form.listed:
            return call
        more = f'(ws "," ws {call})*' if form.several else ""
        return self._rules.add("list", f'"[" ws {call} {more} ws "]"')

    def _call(self, form: CallForm) -> str:
        start = f'"{{" ws {json_literal("name")} ws ":" ws'
        calls = [
            self._rules.add("call", f"{start} {json_literal(name)} {self._rest_of_call(form, part)}")
            for name, part in form.tools.items()
        ]
        return self._rules.add("choice", " | ".join(calls))

    def _rest_of_call(self, form: CallForm, part: FormPart) -> str:
        """What follows the tool's name."""
        rest = f'ws "," ws {json_literal(form.arguments)} ws ":" ws {self._arguments(form, part)} ws "}}"'
        return self._rules.add("rest", rest)

    def _arguments(self, form: CallForm, part: FormPart) -> str:
        try:
            kinds = part.schema.get("type", "object") if isinstance(part.schema, dict) else None
            # Arguments are an object, which parameters need not say.
            if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
                raise BadRequest.at(f"{part.where}.type", "arguments are an object")
            return self.values(part, part.schema | {"type": "object"})
        except BadRequest:
            if not form.optional:
                raise
            self.dropped[part.where] = None
            return "object"

    def text_with_calls(self, form: CallForm) -> str:
        """Text that is free until a call begins in it: the runtime watches for the beginnings (`TagDispatch`)."""
        if form.tags is not None:
            opening, closing = form.tags
            beginnings = [(opening, self._rules.add("inside", f"ws {self._between_tags(form)} ws {literal(closing)}"))]
        else:
            beginnings = [
                (beginning, rest)
                for name, part in form.tools.items()
                for rest in [self._rest_of_call(form, part)]
                for beginning in _call_beginnings(name)
            ]
        grammar = self.grammar(list(dict.fromkeys(rule for _, rule in beginnings)))
        tags = ", ".join(f"({literal(beginning)}, {rule})" for beginning, rule in beginnings)
        # Another root; unless there may be several calls, the text ends after the first.
        _, _, rules = grammar.partition("\n")
        return f"root ::= TagDispatch({tags}, loop_after_dispatch={str(form.several).lower()})\n{rules}"


def _call_beginnings(name: str) -> list[str]:
    """The spellings of a call in bare JSON up to the tool's name."""
    written = [f'{opening}"name"{colon}' for opening in _OPENINGS for colon in _COLONS]
    written += [f'{{"type"{colon}"function",{blank}"name"{colon}' for colon, blank in ((": ", " "), (":", ""))]
    return [start + json.dumps(name, ensure_ascii=False) for start in written]
