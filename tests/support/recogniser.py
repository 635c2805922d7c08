"""Whether a grammar admits a text: an oracle that shares no code with the translation, the runtime or its cost model.

Parses with sets of end positions: no left recursion, which no grammar of this project has.
"""

import re

_TOKEN = re.compile(
    r'\s+|(?P<name>[A-Za-z]\w*)|(?P<literal>"(?:[^"\\]|\\.)*")|(?P<set>\[(?:[^\]\\]|\\.)*\])'
    r"|\{(?P<low>\d+)(?P<comma>,?)(?P<high>\d*)\}|(?P<sign>[()|*+?])"
)
_SIGNS = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class Recogniser:
    """Reads an EBNF text once; `admits` then answers for any number of texts."""

    def __init__(self, grammar):
        self._rules = {}
        for line in grammar.splitlines():
            name, body = line.split(" ::= ", 1)
            tokens = [match for match in _TOKEN.finditer(body) if not match[0].isspace()]
            assert "".join(match[0] for match in tokens) == re.sub(r"(\"(?:[^\"\\]|\\.)*\"|\[(?:[^\]\\]|\\.)*\])|\s",
                                                                   lambda m: m[1] or "", body), body  # fmt: skip
            self._rules[name] = _options(tokens[::-1])

    def admits(self, text):
        """Whether the text as a whole is derived from `root`."""
        return len(text) in _Run(self._rules, text).ends(("rule", "root"), 0)


class _Run:
    def __init__(self, rules, text):
        self._rules = rules
        self._text = text
        self._seen = {}

    def ends(self, node, start):
        kind = node[0]
        if kind == "literal":
            return {start + len(node[1])} if self._text.startswith(node[1], start) else set()
        if kind == "set":
            return {start + 1} if start < len(self._text) and node[1].match(self._text, start) else set()
        if kind == "rule":
            key = node[1], start
            if key not in self._seen:
                self._seen[key] = set()
                self._seen[key] = self.ends(self._rules[node[1]], start)
            return self._seen[key]
        if kind == "either":
            return set().union(*(self.ends(option, start) for option in node[1]))
        if kind == "all":
            places = {start}
            for part in node[1]:
                places = set().union(*(self.ends(part, place) for place in places))
            return places
        return self._repeated(node, start)

    def _repeated(self, node, start):
        _, item, low, high = node
        found, reached, places, count = set(), set(), {start}, 0
        while places and (high is None or count <= high):
            if count >= low:
                found |= places
                if high is None:
                    places -= reached
                    reached |= places
            places = set().union(*(self.ends(item, place) for place in places))
            count += 1
        return found


def _options(tokens):
    options = [[]]
    while tokens and tokens[-1]["sign"] != ")":
        token = tokens.pop()
        if token["sign"] == "|":
            options.append([])
        elif token["sign"] in _SIGNS:
            options[-1][-1] = ("repeated", options[-1][-1], *_SIGNS[token["sign"]])
        elif token["low"] is not None:
            high = token["low"] if not token["comma"] else token["high"]
            options[-1][-1] = ("repeated", options[-1][-1], int(token["low"]), int(high) if high else None)
        elif token["sign"] == "(":
            options[-1].append(_options(tokens))
            tokens.pop()
        elif token["name"]:
            options[-1].append(("rule", token["name"]))
        elif token["literal"]:
            options[-1].append(("literal", _unescaped(token["literal"][1:-1])))
        else:
            options[-1].append(("set", re.compile(_set(token["set"]))))
    return ("either", [("all", option) for option in options])


_UNIT = re.compile(r"\\U([0-9a-fA-F]{8})|\\u([0-9a-fA-F]{4})|\\x([0-9a-fA-F]{2})|\\(.)|([^\\])", re.DOTALL)
_LETTERS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "b": "\b"}


def _unit(match):
    code = match[1] or match[2] or match[3]
    return chr(int(code, 16)) if code else _LETTERS.get(match[4], match[4]) or match[5]


def _unescaped(body):
    return _UNIT.sub(_unit, body)


def _set(text):
    """A class as the `re` module writes it: every character as a code, ranges kept."""
    body = text[2:-1] if text.startswith("[^") else text[1:-1]
    parts = ["-" if unit[0] == "-" else re.escape(_unit(unit)) for unit in _UNIT.finditer(body)]
    if parts and parts[-1] == "-":
        parts[-1] = r"\-"
    if parts and parts[0] == "-":
        parts[0] = r"\-"
    return f"[{'^' if text.startswith('[^') else ''}{''.join(parts)}]"
