"""Random texts that a grammar admits, derived from its rules: quick, and without the runtime."""

import math
import sys

from tests.support.recogniser import Recogniser


class Sampler(Recogniser):
    """Derives texts; from a depth on it takes the shortest way to the end."""

    def __init__(self, grammar):
        super().__init__(grammar)
        self._depths = dict.fromkeys(self._rules, math.inf)
        for _ in self._rules:
            before = dict(self._depths)
            for name, node in self._rules.items():
                self._depths[name] = 1 + self._depth(node)
            if before == self._depths:
                break

    def sample(self, random, most=12):
        """One text, or None if no text ends."""
        return None if self._depths["root"] == math.inf else self._text(("rule", "root"), random, most)

    def _depth(self, node):
        if node[0] == "rule":
            return self._depths[node[1]]
        if node[0] == "either":
            return min(map(self._depth, node[1]))
        if node[0] == "all":
            return max(map(self._depth, node[1]), default=0)
        return self._depth(node[1]) if node[0] == "repeated" and node[2] else 0

    def _text(self, node, random, depth):
        if node[0] == "rule":
            return self._text(self._rules[node[1]], random, depth - 1)
        if node[0] == "either":
            ways = [(self._depth(option), option) for option in node[1]]
            shortest = min(way for way, _ in ways)
            possible = [option for way, option in ways if way < math.inf and (depth > 0 or way == shortest)]
            return self._text(random.choice(possible), random, depth)
        if node[0] == "all":
            return "".join(self._text(part, random, depth) for part in node[1])
        if node[0] == "repeated":
            _, item, low, high = node
            more = 0 if depth <= 0 or self._depth(item) == math.inf else 3
            count = random.randint(low, low + more if high is None else min(high, low + more))
            return "".join(self._text(item, random, depth - 1) for _ in range(count))
        return node[1] if node[0] == "literal" else _character(node[1], random)


def _character(pattern, random):
    for _ in range(40):
        found = (
            random.choice('abcxyzABC0123456789_- ."\\\t\n~/:eéß漢😀')
            if random.random() < 0.5
            else chr(random.randrange(0x20, 0x7F))
        )
        if pattern.match(found):
            return found
    return next(found for found in map(chr, range(sys.maxunicode + 1)) if pattern.match(found))
