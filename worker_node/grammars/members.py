"""What stands between the brackets of objects and lists, with commas: in order, each once, counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from worker_node.grammars.ebnf import Rules
from worker_node.grammars.repetition import repeated

MAX_COUNT = 2048
_MAX_STATES = 1024

Spend = Callable[[int], None]


class Member(NamedTuple):
    """`text`: its rule; `needed`: whether it may be left out."""

    text: str
    needed: bool


def listed(rules: Rules, item: str, least: int, most: int | None) -> str:
    """Items of one kind."""
    following = rules.add("next", f'ws "," ws {item}')
    rest = repeated(rules, following, max(0, least - 1), None if most is None else min(most, MAX_COUNT) - 1)
    return f"({item} {rest})" if least else f"({item} {rest})?"


def in_order(rules: Rules, members: list[Member], others: str | None = None) -> str:
    """Members in order, those that are not needed left out or not, then any number of others."""
    rest, begun = ('""', '""') if others is None else (listed(rules, others, 0, None), f'(ws "," ws {others})*')
    for member in reversed(members):
        name = rules.add("member", member.text)
        after = rules.add("more", begun)
        rest_rule = rules.add("rest", rest)
        rest = f"{name} {after}" if member.needed else f"{name} {after} | {rest_rule}"
        begun = f'ws "," ws {name} {after}' if member.needed else f'(ws "," ws {name})? {after}'
    return rules.add("members", rest)


def in_order_counted(
    rules: Rules, members: list[Member], others: str | None, least: int, most: int | None, spend: Spend
) -> str | None:
    """As `in_order`, with a count: None if there is no way. Raises ValueError where it would be large.

    The others count as one at least, however many there are: they may have the same key.
    """
    top = max(least, 1) if most is None else most
    top = min(top, len(members) + (least if others else 0) + 1)
    if (len(members) + 1) * (top + 1) > _MAX_STATES:
        raise ValueError(f"it needs more than {_MAX_STATES} rules")
    spend((len(members) + 1) * (top + 1))
    row = [_rest(rules, others, count, least, most) for count in range(top + 1)]
    for member in reversed(members):
        name = rules.add("member", member.text)
        new: list[str | None] = []
        for count in range(top + 1):
            after = row[count + 1] if count < top else (row[count] if most is None or top < most else None)
            comma = 'ws "," ws ' if count else ""
            ways = [] if after is None else [f"{comma}{name} {after}"]
            if not member.needed and (left_out := row[count]) is not None:
                ways.append(left_out)
            new.append(rules.add("rest", " | ".join(ways)) if ways else None)
        row = new
    return row[0]


def _rest(rules: Rules, others: str | None, count: int, least: int, most: int | None) -> str | None:
    missing = max(0, least - count)
    left = None if most is None else most - count
    if missing > (others is not None) or (left is not None and left < missing):
        return None
    if others is None or left == 0:
        return rules.add("rest", '""')
    if not count:
        return rules.add("rest", listed(rules, others, missing, left))
    following = rules.add("next", f'ws "," ws {others}')
    return rules.add("rest", repeated(rules, following, missing, None if left is None else min(left, MAX_COUNT)))


def containing(
    rules: Rules,
    match: str | None,
    other: str | None,
    found: tuple[int, int | None],
    length: tuple[int, int | None],
    spend: Spend,
) -> str | None:
    """Items of which so many match (`found`: least and most); None if there is no way. Raises ValueError where large.

    `match` and `other` are the rules of items that do and that do not, None if there are none.
    """
    top = found[0] if found[1] is None else found[1]
    longest = max(length[0], 1) if length[1] is None else length[1]
    if (top + 1) * (longest + 1) > _MAX_STATES:
        raise ValueError(f"it needs more than {_MAX_STATES} rules")
    spend((top + 1) * (longest + 1))
    names: dict[tuple[int, int], str | None] = {}

    def state(matched: int, count: int) -> str | None:
        key = matched, count
        if key not in names:
            names[key] = rules.reserve("items")
            ways = []
            for item, more in ((match, 1), (other, 0)):
                after_match = min(matched + more, top) if found[1] is None else matched + more
                after_count = min(count + 1, longest) if length[1] is None else count + 1
                if item is None or after_match > top or after_count > longest:
                    continue
                if (after := state(after_match, after_count)) is not None:
                    ways.append((f'ws "," ws {item} ' if count else f"{item} ") + after)
            if matched >= found[0] and count >= length[0]:
                ways.append('""')
            own = names[key]
            # A state that only leads to itself ends nowhere.
            if own is None or not [way for way in ways if not way.endswith(f" {own}")]:
                names[key] = None
            else:
                rules.define(own, " | ".join(ways))
        return names[key]

    return state(0, 0)
