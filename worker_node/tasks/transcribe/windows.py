"""Cuts long audio into windows that a model hears one by one, where it is quiet."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

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


def next_window(path: Path, regions: deque[Window]) -> Window | None:
    """Take the next window of at most 30 s from `regions`, which are in order; None when none is left.

    Regions that lie within 30 s become one window, with the silence between them. A longer region is cut at the
    quietest place of its last 8 s; only that much of the file is read.
    """
    if not regions:
        return None
    begin, longest = regions[0].begin, int(LONGEST_S * RATE)
    end = None
    while regions and regions[0].end - begin <= longest:
        end = regions.popleft().end
    if end is not None:
        return Window(begin, end)
    first = begin + longest - int(_SLACK_S * RATE)
    cut = first + quietest(read_samples(path, Window(first, begin + longest)))
    regions[0] = Window(cut, regions[0].end)
    return Window(begin, cut)


def quietest(samples: NDArray[np.int16]) -> int:
    """The sample in the middle of the quietest 0.2 s; the last such place where several are equally quiet."""
    frames = len(samples) // _FRAME
    loudness = np.abs(samples[: frames * _FRAME].astype(np.int32)).reshape(frames, _FRAME).sum(axis=1)
    pauses = np.convolve(loudness, np.ones(_PAUSE_FRAMES, dtype=np.int64), mode="valid")
    last = len(pauses) - 1 - int(np.argmin(pauses[::-1]))
    return (last + _PAUSE_FRAMES // 2) * _FRAME
