"""What must hold whatever breaks, checked from outside: by the clock, reference answers and the proxies' counters."""

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from benchmarks.chaos.schedule import RECOVERY_S

OVERRUN_S = 0.05
LONGEST_SILENCE_S = 5.0
MIN_COSINE = 0.999


@dataclass
class Report:
    """What happened to the calls, and what must not have happened."""

    seed: int
    seconds: float
    outcomes: Counter = field(default_factory=Counter)
    faults: Counter = field(default_factory=Counter)
    violations: list = field(default_factory=list)
    overruns: list = field(default_factory=list)
    samples: dict = field(default_factory=dict)

    def violated(self, what):
        """Note a violation with the time since the start, for finding it in the schedule."""
        self.violations.append(what)

    def __str__(self):
        calls = sum(self.outcomes.values())
        answered = sum(count for (_, outcome), count in self.outcomes.items() if outcome in {"ok", "200"})
        rows = "\n".join(
            f"    {kind:14s} {outcome:22s} {n:6d}  {self.samples.get((kind, outcome), '')}"
            for (kind, outcome), n in sorted(self.outcomes.items())
        )
        worst = max(self.overruns, default=0.0)
        verdict = "no violation" if not self.violations else f"{len(self.violations)} VIOLATIONS"
        return (
            f"seed {self.seed}, {self.seconds:.0f} s: {calls} calls, {answered} answered, faults {dict(self.faults)}, "
            f"largest overrun {worst * 1e3:.0f} ms: {verdict}\n{rows}"
            + "".join(f"\n  VIOLATION {what}" for what in self.violations[:20])
        )


class LoopLag:
    """How late this process's own event loop ran: that is the caller's delay, not the client's."""

    def __init__(self):
        self._late = []

    async def watch(self):
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            late = time.monotonic() - before - 0.01
            if late > 0.002:
                self._late.append((before, late))

    def between(self, since, until):
        """Seconds of delay in that window."""
        return sum(late for at, late in self._late if at + late >= since and at <= until)


class References:
    """Right answers, taken from a node before anything breaks."""

    def __init__(self):
        self.vectors = {}
        self.answers = {}

    def add_answer(self, prompt, text):
        """A prompt may have several greedy answers: see `Load._answer`."""
        self.answers.setdefault(prompt, set()).add(text)

    def check_vectors(self, space, texts, vectors):
        """None, or what is wrong with them."""
        known = self.vectors.get(space)
        if known is None:
            return f"a vector space that no model here has: {space}"
        wanted = np.stack([known[text] for text in texts])
        if wanted.shape != vectors.shape:
            return f"shape {vectors.shape} in a space of {wanted.shape}"
        cosines = (wanted * vectors).sum(axis=1) / np.linalg.norm(wanted, axis=1) / np.linalg.norm(vectors, axis=1)
        return None if cosines.min() >= MIN_COSINE else f"cosine {cosines.min():.4f} to the reference"


class TrafficWatch:
    """No healthy node goes without traffic for 5 seconds while there is some."""

    def __init__(self, nodes, faults, report, began):
        self._nodes = nodes
        self._faults = faults
        self._report = report
        self._began = began
        self.calls = 0

    async def watch(self):
        last = {node.number: (time.monotonic(), node.proxy.requests, 0) for node in self._nodes}
        while True:
            await asyncio.sleep(0.25)
            now = time.monotonic()
            for node in self._nodes:
                since, requests, calls = last[node.number]
                if node.proxy.requests != requests or not await self._healthy(node, now):
                    last[node.number] = (now, node.proxy.requests, self.calls)
                elif now - since > LONGEST_SILENCE_S and self.calls - calls > 15:
                    at = now - self._began
                    self._report.violated(
                        f"{at:.1f} s: healthy node {node.number} got none of {self.calls - calls} calls in "
                        f"{now - since:.1f} s"
                    )
                    last[node.number] = (now, requests, self.calls)

    async def _healthy(self, node, now):
        if node.one_fault.locked():
            return False
        at = now - self._began
        for fault in self._faults:
            if fault.node in {node.number, None} and fault.at - 0.5 <= at <= fault.until + RECOVERY_S:
                return False
        try:
            _, body = await asyncio.to_thread(node.node.health)
        except OSError:
            self._report.violated(f"{at:.1f} s: node {node.number} does not answer /health, and nothing ails it")
            return False
        return all(model["state"] == "ready" for model in body["models"])
