"""Counted repetition of a rule, in blocks of 16 and 256.

The runtime compiles a count as so many states, each of which it tests against the whole vocabulary: 11 s for 2,000
characters in one count. Blocks are rules, shared by all counts of the same item.
"""

from __future__ import annotations

from worker_node.grammars.ebnf import Rules

_BLOCK = 16
# Each way to end a count is compiled by itself. From here on there are four of them: a little less is admitted.
_ROUNDED_FROM = 64
_ROUND = 4


def repeated(rules: Rules, item: str, least: int, most: int | None) -> str:
    """The EBNF of `least` to `most` items (None: any number); `item` is the name of a rule.

    A range of more than 64 ends up to three items early.
    """
    parts = _exactly(rules, item, least)
    if most is None:
        parts.append(f"{item}*")
    elif most > least:
        span = most - least
        parts.append(_up_to(rules, item, span if span < _ROUNDED_FROM else (span + 1) // _ROUND * _ROUND - 1))
    return " ".join(parts) or '""'


def _exactly(rules: Rules, item: str, count: int) -> list[str]:
    parts = []
    for size in (_BLOCK * _BLOCK, _BLOCK, 1):
        if blocks := count // size:
            # A rule of its own, so that it is shared.
            exact = f"{_block(rules, item, size)}{{{blocks}}}"
            parts.append(exact if size > 1 else rules.add("exactly", exact))
        count %= size
    return parts


def _up_to(rules: Rules, item: str, most: int) -> str:
    """The name of a rule for at most so many items."""
    if most < _BLOCK:
        return rules.add("upto", f"{item}{{0,{most}}}")
    size = _BLOCK if most < _BLOCK * _BLOCK else _BLOCK * _BLOCK
    block, full, rest = _block(rules, item, size), most // size, most % size
    whole = f"{block}{{0,{full - 1}}} {_up_to(rules, item, size - 1)}"
    last = f"{block}{{{full}}} {_up_to(rules, item, rest)}" if rest else f"{block}{{{full}}}"
    return rules.add("upto", f"{whole} | {last}")


def _block(rules: Rules, item: str, size: int) -> str:
    if size == 1:
        return item
    return rules.add("block", f"{_block(rules, item, size // _BLOCK)}{{{_BLOCK}}}")
