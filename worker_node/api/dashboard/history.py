"""The node's activity over time: differences of its counters, in bounded rings of two minutes, 15 minutes and a day."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from dataclasses import dataclass, fields

from prometheus_client.registry import Collector

from worker_node.api.dashboard.events import EventLog, engines_of
from worker_node.api.dashboard.usage import usage
from worker_node.devices.npu import Utilisation
from worker_node.node import Node
from worker_node.observability.metrics import Telemetry

PERIOD_S = 1.0
SAMPLES = 120
# Longer looks back, by the name that the page asks for: seconds of a sample, and how many are kept.
RANGES = {"15m": (5.0, 180), "24h": (300.0, 288)}


@dataclass(frozen=True, slots=True)
class HistoryReading:
    """The counters since the node started, and what is under way, at one moment.

    `npu_busy_us`, `cpu_s` and `memory_bytes` (of the node and its engines) are None where they cannot be read;
    `queued` counts units as admission does: texts, generations. `embedding_s` is the time of all `embeddings`.
    """

    requests: float
    prompt_tokens: float
    output_tokens: float
    texts: float
    npu_busy_us: int | None
    in_flight: int
    queued: int
    errors: float = 0.0
    embeddings: float = 0.0
    embedding_s: float = 0.0
    cpu_s: float | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """So many `seconds` of the node's life, more than a period if it was busy: rates per second, the NPU's busy share
    (0 to 1), the CPU in cores, the mean time of an embedding request in milliseconds, and what was under way, and the
    memory in bytes, at its end. None: unknown."""

    seconds: float
    requests: float
    prompt_tokens: float
    output_tokens: float
    texts: float
    npu: float | None
    in_flight: int
    queued: int
    errors: float
    embedding_ms: float | None
    cpu: float | None
    memory: int | None


class History:
    """The latest samples, oldest first. Pure: the caller passes readings with the monotonic times at which they were
    made.
    """

    def __init__(self, samples: int = SAMPLES, period_s: float = PERIOD_S) -> None:
        self.period_s = period_s
        self._samples: deque[Sample] = deque(maxlen=samples)
        # Rates do not add up to a count: a busy node's samples are longer than a second.
        self._requests: deque[float] = deque(maxlen=samples)
        self._utilisation = Utilisation(shortest_s=0.0)
        self._last: tuple[float, HistoryReading] | None = None

    def add(self, reading: HistoryReading, now: float) -> None:
        """Take a reading; from the second one on each makes a sample."""
        npu = self._utilisation.look(reading.npu_busy_us, now)
        if self._last is not None and now > self._last[0]:
            then, before = self._last
            seconds = now - then
            self._requests.append(reading.requests - before.requests)
            self._samples.append(
                Sample(
                    seconds=round(seconds, 3),
                    requests=_rate(before.requests, reading.requests, seconds),
                    prompt_tokens=_rate(before.prompt_tokens, reading.prompt_tokens, seconds),
                    output_tokens=_rate(before.output_tokens, reading.output_tokens, seconds),
                    texts=_rate(before.texts, reading.texts, seconds),
                    npu=None if npu is None else round(npu, 3),
                    in_flight=reading.in_flight,
                    queued=reading.queued,
                    errors=_rate(before.errors, reading.errors, seconds),
                    embedding_ms=_mean_ms(before, reading),
                    cpu=_cores(before.cpu_s, reading.cpu_s, seconds),
                    memory=reading.memory_bytes,
                )
            )
        self._last = (now, reading)

    def is_due(self, now: float) -> bool:
        """Whether a reading at that time makes the next sample; half a reading early is not too early."""
        return self._last is None or now - self._last[0] >= self.period_s - PERIOD_S / 2

    @property
    def requests(self) -> int:
        """The requests of all samples that are kept, counted."""
        return int(sum(self._requests))

    def series(self) -> dict[str, list[float | int | None]]:
        """The samples by field."""
        return {field.name: [getattr(sample, field.name) for sample in self._samples] for field in fields(Sample)}


class Histories:
    """The history of two minutes, and the longer ones by name."""

    def __init__(self) -> None:
        self.recent = History()
        self.longer = {name: History(samples, period_s) for name, (period_s, samples) in RANGES.items()}

    def add(self, reading: HistoryReading, now: float) -> None:
        """Take a reading of this second; each ring keeps those that fall due."""
        self.recent.add(reading, now)
        for history in self.longer.values():
            if history.is_due(now):
                history.add(reading, now)


def _mean_ms(before: HistoryReading, after: HistoryReading) -> float | None:
    count = after.embeddings - before.embeddings
    return round((after.embedding_s - before.embedding_s) / count * 1e3, 2) if count > 0 else None


def _cores(before: float | None, after: float | None, seconds: float) -> float | None:
    """None where the sum fell: a process ended, and took its time with it."""
    if before is None or after is None or after < before:
        return None
    return round((after - before) / seconds, 2)


def _rate(before: float, after: float, seconds: float) -> float:
    return round((after - before) / seconds, 2)


def read(node: Node) -> HistoryReading:
    """Read the node's counters."""
    telemetry = node.telemetry
    placements = [placement for model in node.manager.models for placement in model.placements]
    pids = [pid for placement in placements if (pid := placement.engine.status.pid) is not None]
    used = usage([os.getpid(), *pids])
    embeddings, embedding_s = _embedding_time(node)
    return HistoryReading(
        requests=total(telemetry.routes),
        prompt_tokens=total(telemetry.prompt_tokens),
        output_tokens=_made(telemetry, "tokens"),
        texts=_made(telemetry, "texts"),
        npu_busy_us=node.npu.busy_time_us(),
        in_flight=node.state.in_flight,
        queued=sum(placement.admission.queue_depth for placement in placements),
        errors=total(telemetry.errors),
        embeddings=embeddings,
        embedding_s=embedding_s,
        cpu_s=used[0] if used else None,
        memory_bytes=used[1] if used else None,
    )


def _made(telemetry: Telemetry, what: str) -> float:
    """The sum of this product over all models; 0 where no task makes any."""
    counter = telemetry.made.get(what)
    return 0.0 if counter is None else total(counter)


def _embedding_time(node: Node) -> tuple[float, float]:
    """Embedding requests that were answered, and the seconds that they took in all."""
    embedders = {model.id for model in node.manager.models if model.installed.dimensions is not None}
    count = seconds = 0.0
    for metric in node.telemetry.latency.collect():
        for sample in metric.samples:
            if sample.labels.get("model") in embedders:
                count += sample.value if sample.name.endswith("_count") else 0.0
                seconds += sample.value if sample.name.endswith("_sum") else 0.0
    return count, seconds


def total(counter: Collector) -> float:
    """A counter's sum over all of its labels."""
    return sum(
        sample.value
        for metric in counter.collect()
        for sample in metric.samples
        if sample.name == f"{metric.name}_total"
    )


async def keep(node: Node, histories: Histories, events: EventLog) -> None:
    """Take a reading every second, and record what changed, until cancelled."""
    while True:
        histories.add(read(node), time.monotonic())
        events.observe(engines_of(node))
        await asyncio.sleep(PERIOD_S)
