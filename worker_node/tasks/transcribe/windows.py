"""Cuts long audio into windows that a model hears one by one, where it is quiet."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from worker_node.tasks.transcribe.messages import Span

RATE = 16_000
# What a Whisper network hears at once.
LONGEST_S = 30.0
# A window may end this much earlier, at the quietest place.
_SLACK_S = 8.0
_FRAME = RATE // 50
# The pauses between words are longer than this.
_PAUSE_FRAMES = 10


@dataclass(frozen=True, slots=True)
class Window:
    """Samples `begin` up to `end` of the whole."""

    begin: int
    end: int

    @property
    def offset_s(self) -> float:
        """Where it begins, in seconds."""
        return self.begin / RATE

    @property
    def seconds(self) -> float:
        """How long it is."""
        return (self.end - self.begin) / RATE


def read_samples(path: Path, window: Window) -> NDArray[np.int16]:
    """The window's samples of a file of 16-bit PCM."""
    return np.fromfile(path, dtype="<i2", count=window.end - window.begin, offset=2 * window.begin)


def next_window(path: Path, begin: int, total: int) -> Window:
    """The window that begins at sample `begin`: 30 s at most, cut at the quietest place of its last 8 s.

    Reads only that much of the file. The rest of the audio is one window when it fits.
    """
    longest = int(LONGEST_S * RATE)
    if total - begin <= longest:
        return Window(begin, total)
    first = begin + longest - int(_SLACK_S * RATE)
    samples = read_samples(path, Window(first, begin + longest))
    return Window(begin, first + quietest(samples))


def quietest(samples: NDArray[np.int16]) -> int:
    """The sample in the middle of the quietest 0.2 s; the last such place where several are equally quiet."""
    frames = len(samples) // _FRAME
    loudness = np.abs(samples[: frames * _FRAME].astype(np.int32)).reshape(frames, _FRAME).sum(axis=1)
    pauses = np.convolve(loudness, np.ones(_PAUSE_FRAMES, dtype=np.int64), mode="valid")
    last = len(pauses) - 1 - int(np.argmin(pauses[::-1]))
    return (last + _PAUSE_FRAMES // 2) * _FRAME


# What the speech model hears at once: regions of a recording put together, whose times stay those of the recording.

# A time so near to the seam of two pieces may belong to either: what models report is somewhat early or late.
_SEAM_S = 0.3


@dataclass(frozen=True, slots=True)
class Passage:
    """Pieces of a recording in order, at most 30 s together, without what lies between them."""

    pieces: tuple[Window, ...]

    @property
    def samples(self) -> int:
        """How long it is."""
        return sum(piece.end - piece.begin for piece in self.pieces)

    def read(self, pcm: Path) -> NDArray[np.int16]:
        """Its samples."""
        return np.concatenate([read_samples(pcm, piece) for piece in self.pieces])

    def segment(self, span: Span) -> Span:
        """A segment with its times on the recording's clock; it may reach over several pieces."""
        first, last = self._piece(span.begin), self._piece(span.end, ending=True)
        if first < last:
            # What only touches a piece at a seam would otherwise begin or end a long silence away from its words.
            first += self._end(first) - span.begin <= _SEAM_S
            last -= last > first and span.end - self._end(last - 1) <= _SEAM_S
        return Span(self._time(first, span.begin), self._time(max(first, last), span.end), span.text)

    def word(self, span: Span) -> Span:
        """A word with its times on the recording's clock; it lies in the piece that its middle is in."""
        piece = self._piece((span.begin + span.end) / 2)
        return Span(self._time(piece, span.begin), self._time(piece, span.end), span.text)

    def _end(self, place: int) -> float:
        """Where a piece ends, in seconds of the passage; 0 for the one before the first."""
        return sum(piece.seconds for piece in self.pieces[: place + 1])

    def _piece(self, seconds: float, *, ending: bool = False) -> int:
        ends = [self._end(place) for place in range(len(self.pieces))]
        inside = (place for place, end in enumerate(ends) if seconds < end or (ending and seconds <= end))
        return next(inside, len(ends) - 1)

    def _time(self, place: int, seconds: float) -> float:
        piece = self.pieces[place]
        within = seconds - self._end(place - 1)
        if len(self.pieces) > 1:
            within = min(max(within, 0.0), piece.seconds)
        return piece.offset_s + within


def next_passage(pcm: Path, regions: deque[Window]) -> Passage | None:
    """Take the next passage from `regions`, which are in order; None when none is left.

    Regions that fit into 30 s together become one passage. A longer one is cut where it is quiet.
    """
    room, pieces = int(LONGEST_S * RATE), list[Window]()
    while regions:
        region = regions[0]
        if region.end - region.begin <= room:
            pieces.append(regions.popleft())
            room -= region.end - region.begin
        elif pieces:
            break
        else:
            window = next_window(pcm, region.begin, region.end)
            regions[0] = Window(window.end, region.end)
            return Passage((window,))
    return Passage(tuple(pieces)) if pieces else None
