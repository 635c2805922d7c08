"""Rules of a caller's grammar that begin or end with themselves: found from their form alone, in linear time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

from worker_node.grammars.gbnf_syntax import GrammarRefused, Literal, Name, Node, RuleChoice, RuleRow, Times

Rulebook = Mapping[str, Node]


def children(node: Node) -> tuple[Node, ...]:
    """The parts of a part."""
    if isinstance(node, Times):
        return (node.node,)
    return node.nodes if isinstance(node, RuleRow | RuleChoice) else ()


def names_in(node: Node) -> set[str]:
    """The rules that a part refers to."""
    names = set()
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Name):
            names.add(one.name)
        waiting += children(one)
    return names


def endless_rules(rules: Rulebook) -> list[str]:
    """The rules of which no text can end."""
    ending = _rules_that(rules, lambda node: not isinstance(node, Name))
    return [name for name in rules if name not in ending]


def check_sides(rules: Rulebook) -> None:
    """Raise GrammarRefused for a rule that can begin with itself, which no reader could follow, or end with itself."""
    empty = _rules_that(rules, lambda node: isinstance(node, Literal) and not node.text)
    for backwards, side in ((False, "begin"), (True, "end")):
        edges = {name: set(_edge(node, empty, backwards=backwards)) for name, node in rules.items()}
        if (name := _in_a_cycle(edges)) is not None:
            raise GrammarRefused(
                f"the rule {name[:100]!r} can {side} with itself; write a repetition with * or + instead"
            )


def _rules_that(rules: Rulebook, leaf: Callable[[Node], bool]) -> set[str]:
    """The rules that can be read with nothing but leaves of this kind."""
    users = defaultdict(set)
    for name, node in rules.items():
        for used in names_in(node):
            users[used].add(name)
    found: set[str] = set()
    waiting = list(rules)
    while waiting:
        name = waiting.pop()
        if name not in found and _holds(rules[name], found, leaf):
            found.add(name)
            waiting += users[name]
    return found


def _holds(node: Node, found: set[str], leaf: Callable[[Node], bool]) -> bool:
    match node:
        case Name(name):
            return name in found
        case RuleRow(nodes):
            return all(_holds(one, found, leaf) for one in nodes)
        case RuleChoice(nodes):
            return any(_holds(one, found, leaf) for one in nodes)
        case Times(inner, least, _):
            return least == 0 or _holds(inner, found, leaf)
    return leaf(node)


def _edge(node: Node, empty: set[str], *, backwards: bool) -> Iterator[str]:
    """The rules that can come first in a part, or last."""
    match node:
        case Name(name):
            yield name
        case RuleRow(nodes):
            for one in reversed(nodes) if backwards else nodes:
                yield from _edge(one, empty, backwards=backwards)
                if not _holds(one, empty, lambda leaf: isinstance(leaf, Literal) and not leaf.text):
                    break
        case RuleChoice() | Times():
            for one in children(node):
                yield from _edge(one, empty, backwards=backwards)


def _in_a_cycle(edges: Mapping[str, set[str]]) -> str | None:
    """A rule from which a way leads back to it."""
    done: set[str] = set()
    for start in edges:
        path: dict[str, Iterator[str]] = {}
        waiting: str | None = start if start not in done else None
        while waiting is not None or path:
            if waiting is not None:
                path[waiting] = iter(edges[waiting])
            name, following = next(reversed(path.items()))
            waiting = next((one for one in following if one not in done), None)
            if waiting in path:
                return waiting
            if waiting is None:
                done.add(name)
                del path[name]
    return None
