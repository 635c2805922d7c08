"""Counters and histograms for what happens many times a request, kept by the event loop's thread alone.

`prometheus_client`'s own are made for many threads: each `inc` takes a lock and five calls of Python functions. These
are its collectors: they look the same in /metrics.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Tally(Collector):
    """A counter by the values of its labels, of which there must be few."""

    def __init__(self, name: str, text: str, labels: Iterable[str], registry: CollectorRegistry) -> None:
        self._name = name
        self._text = text
        self._labels = tuple(labels)
        self._counts: dict[tuple[str, ...], float] = {}
        registry.register(self)

    def add(self, amount: float, *labels: str) -> None:
        """Count `amount`, which is not negative."""
        self._counts[labels] = self._counts.get(labels, 0.0) + amount

    def collect(self) -> Iterable[Metric]:
        """The counts as Prometheus has them."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for labels, count in self._counts.items():
            family.add_metric(labels, count)
        yield family


class Distribution(Collector):
    """A histogram by the values of its labels; `bounds` are the upper bounds of its buckets, ascending."""

    def __init__(
        self, name: str, text: str, labels: Iterable[str], bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._text = text
        self._labels = tuple(labels)
        self._bounds = tuple(bounds)
        self._marks = [floatToGoString(bound) for bound in (*self._bounds, math.inf)]  # type: ignore[no-untyped-call]
        # Values in each bucket alone, the last beyond all bounds; and their sum.
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: dict[tuple[str, ...], float] = {}
        registry.register(self)

    def observe(self, value: float, *labels: str) -> None:
        """Count a value."""
        if (counts := self._counts.get(labels)) is None:
            counts = self._counts[labels] = [0] * len(self._marks)
            self._sums[labels] = 0.0
        counts[bisect_left(self._bounds, value)] += 1
        self._sums[labels] += value

    def collect(self) -> Iterable[Metric]:
        """The counts as Prometheus has them: each bucket with those below it."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for labels, counts in self._counts.items():
            buckets = list(zip(self._marks, accumulate(counts), strict=True))
            family.add_metric(labels, buckets, self._sums[labels])
        yield family
