"""The whole form of an answer: JSON that matches a schema, calls of tools, or either; one grammar for all of it.

Each schema is a document of its own: a `$ref` in a tool's parameters means a part of that tool's schema, and two tools
may define different things under one name.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from worker_node.errors import BadRequest
from worker_node.grammars.budget import QUICK_STEPS, Budget, OutOfSteps
from worker_node.grammars.ebnf import Rules, json_literal, literal
from worker_node.grammars.schema import add_schema, check_cost


class Part(msgspec.Struct, frozen=True):
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


class CallForm(msgspec.Struct, frozen=True):
    """How calls are written: one object in JSON, with the arguments under the key `arguments`.

    `tools` are the parameters of each tool, by name. Between `tags` the object stands as it is or, `listed`, in a list.
    Without tags the answer is one object. `several` calls may follow each other.
    """

    tools: dict[str, Part]
    arguments: str
    tags: tuple[str, str] | None = None
    listed: bool = False
    several: bool = False


class Form(msgspec.Struct, frozen=True):
    """What an answer may be: JSON that matches the schema of `answer`, or `calls`, or either of the two."""

    answer: Part | None = None
    calls: CallForm | None = None

    @property
    def where(self) -> str:
        """The part of the request that asks for this form."""
        if self.answer is not None:
            return self.answer.where
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
    if form.answer is not None:
        kinds.append(_added(rules, form.answer, form.answer.schema, budget, dropped))
    if form.calls is not None:
        kinds.append(_calls(rules, form.calls, budget, dropped))
    # A call between tags begins with another character than any JSON value.
    grammar = rules.text(kinds[0] if len(kinds) == 1 else rules.add("choice", " | ".join(kinds)))
    check_cost(grammar, form.where)
    return grammar + (_DROPPED + msgspec.json.encode(list(dropped)).decode() if dropped else "")


def _added(rules: Rules, part: Part, schema: Any, budget: Budget, dropped: dict[str, None]) -> str:
    return add_schema(rules, schema, part.where, budget, part.schema, None if part.strict else dropped)


def compile_form_if_quick(form: Any) -> str | None:
    """The same within `QUICK_STEPS`; None for what takes longer."""
    try:
        return compile_form(form, QUICK_STEPS)
    except OutOfSteps:
        return None


def _calls(rules: Rules, form: CallForm, budget: Budget, dropped: dict[str, None]) -> str:
    call = rules.add(
        "choice", " | ".join(_call(rules, name, part, form, budget, dropped) for name, part in form.tools.items())
    )
    if form.tags is None:
        return call
    if form.listed:
        more = f'(ws "," ws {call})*' if form.several else ""
        call = rules.add("list", f'"[" ws {call} {more} ws "]"')
    opening, closing = map(literal, form.tags)
    tagged = rules.add("tagged", f"{opening} ws {call} ws {closing}")
    return rules.add("calls", f"{tagged} (ws {tagged})*") if form.several and not form.listed else tagged


def _call(rules: Rules, name: str, part: Part, form: CallForm, budget: Budget, dropped: dict[str, None]) -> str:
    arguments = _added(rules, part, _of_object(part), budget, dropped)
    return rules.add(
        "call",
        f'"{{" ws {json_literal("name")} ws ":" ws {json_literal(name)} ws "," ws {json_literal(form.arguments)} '
        f'ws ":" ws {arguments} ws "}}"',
    )


def _of_object(part: Part) -> Any:
    """The schema with the condition that arguments are an object, which parameters need not say."""
    schema = part.schema
    kinds = schema.get("type", "object") if isinstance(schema, dict) else None
    if kinds == "object" or (isinstance(kinds, list) and "object" in kinds):
        # Its references may have been made absolute, so it is referred to and not copied.
        return {"$ref": "#", "type": "object"}
    raise BadRequest(f"{part.where}.type: arguments are an object", param=f"{part.where}.type")
