"""Texts with times in the forms that players and editors read."""

from __future__ import annotations

from collections.abc import Iterable

from worker_node.tasks.transcribe.messages import Span


def srt(segments: Iterable[Span]) -> str:
    """SubRip: numbered blocks with a comma before the milliseconds."""
    blocks = (
        f"{number}\n{_clock(span.begin, ',')} --> {_clock(span.end, ',')}\n{_cue(span.text)}\n"
        for number, span in enumerate(segments, 1)
    )
    return "\n".join(blocks)


def vtt(segments: Iterable[Span]) -> str:
    """WebVTT: blocks under a header, with a point before the milliseconds."""
    blocks = (f"{_clock(span.begin, '.')} --> {_clock(span.end, '.')}\n{_cue(span.text)}\n" for span in segments)
    return "\n".join(("WEBVTT\n", *blocks))


def whole(texts: Iterable[str]) -> str:
    """The text of all windows; each begins with its own blank where its language has one."""
    return "".join(texts).strip()


def _cue(text: str) -> str:
    # A blank line, or an arrow, would end or begin a cue.
    return " ".join(text.split()).replace("-->", "->")


def _clock(seconds: float, point: str) -> str:
    milliseconds = max(0, round(seconds * 1000))
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{point}{rest % 1000:03}"
