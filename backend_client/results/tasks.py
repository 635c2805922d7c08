"""Results of reranking and transcription."""

from __future__ import annotations

from dataclasses import dataclass, field

from backend_client.results.origin import Origin, Usage


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """A document and its relevance to the query; `index` is its place in the call. More is better."""

    index: int
    score: float
    text: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankResult(Origin):
    """Documents, the most relevant first; with `top_n` only so many."""

    documents: tuple[RankedDocument, ...]
    usage: Usage


@dataclass(frozen=True, slots=True)
class TranscriptionSegment:
    """A part of a recording, usually a sentence. Times are seconds from its beginning."""

    start: float
    end: float
    text: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class TranscriptionWord:
    """One word of a recording. Times are seconds from its beginning."""

    start: float
    end: float
    word: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcription(Origin):
    """The text of a recording; `duration` is its length in seconds.

    `language` is the language that was named or detected. `segments` and `words` are empty where the node reports none;
    words are reported where `timestamp_granularities` names them.
    """

    text: str = field(repr=False)
    language: str | None = None
    duration: float | None = None
    segments: tuple[TranscriptionSegment, ...] = ()
    words: tuple[TranscriptionWord, ...] = ()
