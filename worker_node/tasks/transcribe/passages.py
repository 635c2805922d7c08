"""What the speech model hears at once: regions of a recording put together, whose times stay those of the recording."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from worker_node.tasks.transcribe.messages import Span
from worker_node.tasks.transcribe.windows import LONGEST_S, RATE, Window, next_window, read_samples

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
