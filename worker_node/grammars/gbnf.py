"""A grammar that a caller wrote, checked and translated: the runtime gets none that could end or occupy the engine.

The runtime ends the process at a mistake in a grammar, and follows every way to read a text. So left recursion is
refused, repetition is held to what `pattern_joiner` allows, and where a rule contains itself the next character has to
tell which way to read on (LL(1)): then one way is open at a time, however deep the text is nested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from worker_node.grammars.character_sets import complement
from worker_node.grammars.ebnf import Rules, literal
from worker_node.grammars.gbnf_syntax import (
    GrammarRefused,
    Literal,
    Name,
    Node,
    RuleChoice,
    RuleRow,
    Set,
    Times,
    read_grammar,
)
from worker_node.grammars.one_sided import check_sides, endless_rules
from worker_node.grammars.pattern_joiner import PatternJoiner
from worker_node.grammars.pattern_parts import Part
from worker_node.grammars.recursion import check_recursion, reachable
from worker_node.grammars.regular import one_of
from worker_node.grammars.writing import AS_IT_IS


def grammar_to_ebnf(text: str, rules: Rules, spend: Callable[[int], None]) -> str:
    """Return the name of the rule for what the grammar's `root` admits; rules are added to `rules`.

    Raises GrammarRefused.
    """
    given = read_grammar(text)
    used = reachable(given, "root")
    given = {name: node for name, node in given.items() if name in used}
    if endless := endless_rules(given):
        raise GrammarRefused(f"the rule {endless[0][:100]!r} admits no text: it never ends")
    check_sides(given)
    return _Translation(given, rules, spend).result()


class _Translation:
    def __init__(self, given: dict[str, Node], rules: Rules, spend: Callable[[int], None]) -> None:
        self._given = given
        self._rules = rules
        self._spend = spend
        self._names = {name: rules.reserve("rule") for name in given}
        self._parts = {name: Part(self._names[name]) for name in given}

    def _sequences(self) -> PatternJoiner:
        return PatternJoiner(self._rules, references=True)

    def result(self) -> str:
        """The name of the root's rule."""
        # What a rule can begin and end with depends on others, and on itself: until nothing is added.
        while self._grown():
            pass
        check_recursion(self._given, lambda node: self._part(node, self._sequences(), ""), self._spend)
        for name, node in self._given.items():
            sequences = self._sequences()
            part = self._part(node, sequences, name)
            if sequences.refusal is not None:
                raise GrammarRefused(sequences.refusal)
            self._rules.define(self._names[name], part.text)
        return self._names["root"]

    def _grown(self) -> bool:
        grown = False
        for name, node in self._given.items():
            part = _settled(self._part(node, self._sequences(), name), self._names[name])
            grown = grown or part != self._parts[name]
            self._parts[name] = part
        return grown

    def _part(self, node: Node, sequences: PatternJoiner, rule: str) -> Part:
        self._spend(1)
        place = f"the end of the rule {rule[:100]!r}"
        match node:
            case Name(name):
                part = self._parts[name]
                self._spend(len(part.first) + len(part.head) + len(part.tail) + len(part.characters))
                return part
            case Literal(text):
                return _exactly(text)
            case Set(ranges, inverted):
                return _any_of(complement(ranges) if inverted else ranges)
            case Times(inner, least, most):
                return sequences.repeated(self._part(inner, sequences, rule), least, most, place)
            case RuleChoice(nodes):
                return sequences.either([self._part(one, sequences, rule) for one in nodes], place)
            case RuleRow(nodes):
                joined = sequences.joined([self._part(one, sequences, rule) for one in nodes], place)
                self._spend(len(joined.head) * len(joined.tail))
                return joined


def _settled(part: Part, name: str) -> Part:
    """The part as others see it: a reference, and everything in one order."""
    return replace(
        part,
        text=name,
        characters=tuple(sorted(set(part.characters))),
        first=tuple(sorted(set(part.first))),
        head=tuple(sorted(set(part.head))),
        tail=tuple(sorted(set(part.tail))),
    )


def _exactly(text: str) -> Part:
    if any(AS_IT_IS.leaves_out(ord(character)) for character in text):
        raise GrammarRefused("a control character other than a tab or an end of line cannot be written")
    codes = [(ord(character), ord(character)) for character in text]
    return Part(literal(text), not text, characters=tuple(dict.fromkeys(codes)), first=tuple(codes[:1]))


def _any_of(ranges: Iterable[tuple[int, int]]) -> Part:
    plain = [part for low, high in ranges for part in AS_IT_IS.plain(low, high)]
    if not plain:
        raise GrammarRefused("a class without a character that can be written")
    return Part(one_of(plain), characters=tuple(plain), first=tuple(plain))
