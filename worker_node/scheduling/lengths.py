"""Predicts how long answers get, learned from those that were generated: pure arithmetic.

Most answers end by themselves long before their limit, and many are still running or were cut. So the estimator learns
what share of the answers that outgrow one length ends before the next, in classes of length that grow geometrically; an
answer counts as an observation as soon as it has left a class. From these shares follows how much longer an answer of
any length is expected to get, also where a few long answers are among many short ones.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, field

# Lengths in tokens that begin a class: of one token each at first, then each about 1.4 times as wide as the one before.
_EDGES = (0, 1, 2, 3, *(round(4 * 2 ** (step / 2)) for step in range(30)))
_LAST = len(_EDGES) - 1
# Before anything is known answers are taken to have 256 tokens on average, with the weight of a fifth of an answer.
_PRIOR_TOKENS = 256
_PRIOR_ANSWERS = 0.2
# Observations of more answers than this in one class make the older ones fade.
_MEMORY_ANSWERS = 256
_REFRESH_ANSWERS = 8
_LEAST_SHARE = 1e-6


def _width(index: int) -> int:
    return (_EDGES[index + 1] if index < _LAST else 2 * _EDGES[index]) - _EDGES[index]


def _class_of(length: int) -> int:
    """The class of the last token of an answer: one of as many tokens as an edge has not passed it."""
    return max(0, bisect.bisect_left(_EDGES, length) - 1)


@dataclass(slots=True)
class AnswerLengths:
    """Expected lengths. Learning costs O(1) a token delta, an expectation O(1)."""

    _passed: list[float] = field(default_factory=lambda: [0.0] * len(_EDGES))
    _ended: list[float] = field(default_factory=lambda: [0.0] * len(_EDGES))
    _unread: int = _REFRESH_ANSWERS
    _hazard: list[float] = field(default_factory=list)
    _summed: list[float] = field(default_factory=list)  # the hazard up to each edge
    _rest: list[float] = field(default_factory=list)  # the expected rest at each edge

    def grew(self, length: int, tokens: int) -> None:
        """Record that an answer of `length` tokens got `tokens` more."""
        for index in range(_class_of(length), _class_of(length + tokens)):
            self._passed[index] += 1
            self._fade(index)

    def ended(self, length: int, *, by_itself: bool) -> None:
        """Record that an answer ended with `length` tokens; one that was cut at its limit would have gone on."""
        index = _class_of(length)
        (self._ended if by_itself else self._passed)[index] += 1
        self._unread += _REFRESH_ANSWERS
        self._fade(index)

    def expected_rest(self, length: int, limit: int) -> float:
        """How many more tokens an answer of `length` tokens is expected to get, if it is cut at `limit` in all."""
        if limit <= length:
            return 0.0
        if self._unread >= _REFRESH_ANSWERS:
            self._refresh()
        here, summed_here = self._at(length)
        there, summed_there = self._at(limit)
        return max(0.0, here - math.exp(summed_here - summed_there) * there)

    def rest_of(self, share: float, length: int, limit: int) -> float:
        """How many more tokens at least this share (above 0) of the answers of `length` tokens get, up to `limit`."""
        if self._unread >= _REFRESH_ANSWERS:
            self._refresh()
        summed = self._at(length)[1] - math.log(share)
        index = min(bisect.bisect_right(self._summed, summed) - 1, _LAST)
        return min(limit, _EDGES[index] + (summed - self._summed[index]) / self._hazard[index]) - length

    def _at(self, length: int) -> tuple[float, float]:
        """The expected rest and the summed hazard at a length."""
        index = bisect.bisect_right(_EDGES, length) - 1
        hazard = self._hazard[index]
        summed = self._summed[index] + hazard * (length - _EDGES[index])
        if index == _LAST:
            return 1 / hazard, summed
        survives = math.exp(-hazard * (_EDGES[index + 1] - length))
        return (1 - survives) / hazard + survives * self._rest[index + 1], summed

    def _fade(self, index: int) -> None:
        self._unread += 1
        if self._passed[index] + self._ended[index] > _MEMORY_ANSWERS:
            self._passed[index] /= 2
            self._ended[index] /= 2

    def _refresh(self) -> None:
        self._unread = 0
        self._hazard = []
        self._summed = [0.0]
        for index in range(len(_EDGES)):
            width = _width(index)
            stay = math.exp(-width / _PRIOR_TOKENS)
            passed = self._passed[index] + _PRIOR_ANSWERS * stay
            ended = self._ended[index] + _PRIOR_ANSWERS * (1 - stay)
            hazard = -math.log(max(_LEAST_SHARE, passed / (passed + ended))) / width
            self._hazard.append(hazard)
            self._summed.append(self._summed[-1] + hazard * width)
        rest = [0.0] * len(_EDGES)
        rest[_LAST] = 1 / self._hazard[_LAST]
        for index in reversed(range(_LAST)):
            hazard = self._hazard[index]
            survives = math.exp(-hazard * _width(index))
            rest[index] = (1 - survives) / hazard + survives * rest[index + 1]
        self._rest = rest
