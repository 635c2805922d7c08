"""From what a small model wrote to the form that a job promises."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import orjson

from worker_node.jobs.schemas import Schema

MAX_TITLE_WORDS = 8
MAX_BULLETS = 4

_FENCE = re.compile(r"^\s*(```|~~~).*$", re.MULTILINE)
_LINE_MARK = re.compile(r"^\s*(?:#{1,6}\s+|>\s*|[-*+•]\s+|\d{1,2}[.)]\s+)")
_BULLET = re.compile(r"^\s*(?:[-*+•]|\d{1,2}[.)])\s+")
_RULE = re.compile(r"^\s*[-*_=#\s]+$")
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_EMPHASIS = re.compile(r"[*_`~]{1,3}(?=\S)|(?<=\S)[*_`~]{1,3}(?=\W|$)")
_LABEL = re.compile(r"^(?:title|summary|here(?: is|'s) (?:a|the)[^:]{0,40})\s*:\s*", re.IGNORECASE)
# A title that was cut does not end in one of these.
_DANGLING = frozenset(
    ("a", "an", "and", "as", "at", "by", "for", "from", "in", "is", "of", "on", "or", "the", "to", "was", "with")
)
_MARKS = re.compile(r"</?text>")
# Apostrophes stay: they belong to words.
_QUOTES = str.maketrans("", "", '"“”„«»‟"')


def title(text: str) -> str:
    """One line of at most eight words, without markdown and quotes; empty if the text holds no word."""
    for line in _plain(text).splitlines():
        words = _without_label(_bare(line)).translate(_QUOTES).split()
        if _has_word(line) and words:
            kept = words[:MAX_TITLE_WORDS]
            while len(words) > MAX_TITLE_WORDS and len(kept) > 1 and kept[-1].lower() in _DANGLING:
                kept.pop()
            made = " ".join(kept)
            # What is taken off an end may leave another mark there.
            while (plain := _bare(made.strip(" '’‘`.,;:-–—*_#~|"))) != made:
                made = plain
            if made:
                return made
    return ""


def summary(text: str) -> str:
    """One paragraph, or up to four bullets, each a line that begins with `- `; empty if the text holds no word."""
    lines = [line for line in _plain(text).splitlines() if line.strip() and not _RULE.match(line)]
    bullets = [_bare(line) for line in lines if _BULLET.match(line)]
    bullets = [bullet for bullet in bullets if _has_word(bullet)]
    if len(bullets) > 1:
        return "\n".join(f"- {bullet}" for bullet in bullets[:MAX_BULLETS])
    paragraph = " ".join(_without_label(_bare(line)) for line in _first_paragraph(text))
    return paragraph.strip() if _has_word(paragraph) else ""


def json_object(text: str, schema: Schema) -> dict[str, Any] | None:
    """The object that the text is, or None if it was cut before it closed or is not what the schema describes."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    properties: dict[str, Schema] = schema["properties"]
    if not isinstance(value, dict) or value.keys() != properties.keys():
        return None
    return value if all(_fits(value[name], part) for name, part in properties.items()) else None


def excerpt(text: str, kept: int) -> str:
    """`kept` characters of the text, two thirds from its beginning and one from its end, with a mark between them."""
    if kept >= len(text):
        return text
    tail = kept // 3
    return f"{text[: kept - tail]} […] {text[len(text) - tail :]}"


def _fits(value: object, schema: Schema) -> bool:
    if "enum" in schema:
        return value in schema["enum"]
    if schema["type"] == "array":
        return (
            isinstance(value, list)
            and len(value) <= schema["maxItems"]
            and all(_fits(item, schema["items"]) for item in value)
        )
    if schema["type"] == "boolean":
        return isinstance(value, bool)
    return isinstance(value, str) and schema["minLength"] <= len(value) <= schema["maxLength"]


def _plain(text: str) -> str:
    text = _MARKS.sub("", text)
    return _LINK.sub(r"\1", _FENCE.sub("", text))


def _first_paragraph(text: str) -> list[str]:
    """The lines of the first paragraph that holds a word after its label."""
    for paragraph in re.split(r"\n\s*\n", textwrap.dedent(_plain(text))):
        lines = [line for line in paragraph.splitlines() if not _RULE.match(line)]
        if _has_word(" ".join(_without_label(_bare(line)) for line in lines)):
            return lines
    return []


def _bare(line: str) -> str:
    """A line without the marks of markdown."""
    while (stripped := _LINE_MARK.sub("", line)) != line:
        line = stripped
    return _EMPHASIS.sub("", line).strip()


def _without_label(line: str) -> str:
    return _LABEL.sub("", line)


def _has_word(text: str) -> bool:
    return any(map(str.isalnum, text))
