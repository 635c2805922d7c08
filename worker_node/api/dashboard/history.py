"""What the node did in the last two minutes, second by second: differences of its own counters, in bounded rings."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, fields

from prometheus_client import Counter

from worker_node.devices.busy import Utilisation
from worker_node.node import Node

PERIOD_S = 1.0
SAMPLES = 120


@dataclass(frozen=True, slots=True)
class HistoryReading:
    """The counters since the node started, and what is under way, at one moment.

    `npu_busy_us` is None where the counter cannot be read; `queued` counts units as admission does: texts, generations.
    """

    requests: float
    prompt_tokens: float
    output_tokens: float
    texts: float
    npu_busy_us: int | None
    in_flight: int
    queued: int


@dataclass(frozen=True, slots=True)
class Sample:
    """A second of the node's life: rates per second, the NPU's busy share (0 to 1, None unknown), and what was under
    way at its end."""

    requests: float
    prompt_tokens: float
    output_tokens: float
    texts: float
    npu: float | None
    in_flight: int
    queued: int


class History:
    """The latest samples, oldest first. Pure: it is given readings and the monotonic times at which they were made."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self._samples: deque[Sample] = deque(maxlen=samples)
        self._utilisation = Utilisation(shortest_s=0.0)
        self._last: tuple[float, HistoryReading] | None = None

    def add(self, reading: HistoryReading, now: float) -> None:
        """Take a reading; from the second one on each makes a sample."""
        npu = self._utilisation.look(reading.npu_busy_us, now)
        if self._last is not None and now > self._last[0]:
            then, before = self._last
            seconds = now - then
            self._samples.append(
                Sample(
                    requests=_rate(before.requests, reading.requests, seconds),
                    prompt_tokens=_rate(before.prompt_tokens, reading.prompt_tokens, seconds),
                    output_tokens=_rate(before.output_tokens, reading.output_tokens, seconds),
                    texts=_rate(before.texts, reading.texts, seconds),
                    npu=None if npu is None else round(npu, 3),
                    in_flight=reading.in_flight,
                    queued=reading.queued,
                )
            )
        self._last = (now, reading)

    def series(self) -> dict[str, list[float | int | None]]:
        """The samples by field."""
        return {field.name: [getattr(sample, field.name) for sample in self._samples] for field in fields(Sample)}


def _rate(before: float, after: float, seconds: float) -> float:
    return round((after - before) / seconds, 2)


def read(node: Node) -> HistoryReading:
    """Read the node's counters."""
    telemetry = node.telemetry
    placements = [placement for model in node.manager.models for placement in model.placements]
    return HistoryReading(
        requests=total(telemetry.routes),
        prompt_tokens=total(telemetry.prompt_tokens),
        output_tokens=total(telemetry.generation_tokens),
        texts=total(telemetry.embedded_texts),
        npu_busy_us=node.npu.read().busy_time_us.value,
        in_flight=node.state.in_flight,
        queued=sum(placement.admission.queue_depth for placement in placements),
    )


def total(counter: Counter) -> float:
    """A counter's sum over all of its labels."""
    return sum(
        sample.value
        for metric in counter.collect()
        for sample in metric.samples
        if sample.name == f"{metric.name}_total"
    )


async def keep(node: Node, history: History) -> None:
    """Add a reading every second, until cancelled."""
    while True:
        history.add(read(node), time.monotonic())
        await asyncio.sleep(PERIOD_S)
