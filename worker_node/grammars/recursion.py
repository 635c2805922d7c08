"""Rules of a caller's grammar that contain themselves: which may, and what each reads next."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from worker_node.grammars.gbnf_syntax import GrammarRefused, Name, Node, RuleChoice, RuleRow, Times
from worker_node.grammars.one_sided import Rulebook, names_in
from worker_node.grammars.pattern_parts import Part

Characters = frozenset[tuple[int, int]]
_NONE: Characters = frozenset()


def reachable(rules: Rulebook, start: str) -> set[str]:
    """The rules that `start` needs. Raises GrammarRefused for names of no rule."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        if name not in rules:
            raise GrammarRefused(f"there is no rule {name[:100]!r}")
        found.add(name)
        waiting += names_in(rules[name])
    return found


def check_recursion(rules: Rulebook, part_of: Callable[[Node], Part], spend: Callable[[int], None]) -> None:
    """Raise GrammarRefused for recursion that the runtime could follow in several ways at once.

    No rule begins or ends with itself: `one_sided` has refused that.
    """
    _Recursion(rules, part_of, spend).check()


class _Recursion:
    def __init__(self, rules: Rulebook, part_of: Callable[[Node], Part], spend: Callable[[int], None]) -> None:
        self._rules = rules
        self._spend = spend
        self._part_of = part_of
        self._parts: dict[int, Part] = {}
        uses = {name: names_in(node) for name, node in rules.items()}
        self._needs = {name: self._closure(name, uses) for name in rules}
        self._follow: dict[str, Characters] = dict.fromkeys(rules, _NONE)

    def check(self) -> None:
        """See `check_recursion`."""
        if not any(name in needs for name, needs in self._needs.items()):
            return
        while self._followers_grown():
            pass
        for name, node in self._rules.items():
            if name in self._needs[name]:
                self._decide(node, self._follow[name], name)

    def _closure(self, start: str, edges: Mapping[str, Collection[str]]) -> set[str]:
        found: set[str] = set()
        waiting = list(edges[start])
        while waiting:
            name = waiting.pop()
            if name not in found:
                self._spend(1)
                found.add(name)
                waiting += edges[name]
        return found

    def _part(self, node: Node) -> Part:
        if id(node) not in self._parts:
            self._parts[id(node)] = self._part_of(node)
        return self._parts[id(node)]

    def _inside(self, node: Node, follow: Characters) -> Iterator[tuple[Node, Characters]]:
        """The parts of a part, each with the characters that can follow it."""
        match node:
            case RuleRow(nodes):
                for one in reversed(nodes):
                    yield one, follow
                    part = self._part(one)
                    follow = frozenset(part.first) | (follow if part.empty else _NONE)
            case Times(inner, _, most):
                yield inner, follow if most == 1 else follow | frozenset(self._part(inner).first)
            case RuleChoice(nodes):
                yield from ((one, follow) for one in nodes)

    def _followers_grown(self) -> bool:
        before = dict(self._follow)
        for name, rule in self._rules.items():
            waiting = [(rule, self._follow[name])]
            while waiting:
                node, follow = waiting.pop()
                self._spend(1 + len(follow))
                if isinstance(node, Name):
                    self._follow[node.name] |= follow
                waiting += self._inside(node, follow)
        return before != self._follow

    def _recurs(self, node: Node, rule: str) -> bool:
        return any(name == rule or rule in self._needs[name] for name in names_in(node) if name in self._needs[rule])

    def _decide(self, node: Node, follow: Characters, rule: str) -> None:
        """Raise unless the next character tells which way to go wherever a way leads back to the rule."""
        if not self._recurs(node, rule):
            return
        if isinstance(node, RuleChoice):
            begins = [self._begins(one, follow) for one in node.nodes]
            for index, one in enumerate(node.nodes):
                others = [other for place, other in enumerate(begins) if place != index]
                ends_too = self._part(one).empty and any(
                    self._part(other).empty for other in node.nodes if other is not one
                )
                if self._recurs(one, rule) and (ends_too or any(self._meet(begins[index], two) for two in others)):
                    raise _undecided(rule)
        if isinstance(node, Times) and node.least != node.most:
            part = self._part(node.node)
            if part.empty or self._meet(frozenset(part.first), follow):
                raise _undecided(rule)
        for one, after in self._inside(node, follow):
            self._decide(one, after, rule)

    def _begins(self, node: Node, follow: Characters) -> Characters:
        part = self._part(node)
        return frozenset(part.first) | (follow if part.empty else _NONE)

    def _meet(self, one: Characters, other: Characters) -> bool:
        self._spend(len(one) * len(other))
        return any(low <= end and start <= high for low, high in one for start, end in other)


def _undecided(rule: str) -> GrammarRefused:
    return GrammarRefused(
        f"the rule {rule[:100]!r} contains itself, and the next character does not tell whether to read it again; let "
        "the alternatives begin with different characters"
    )
