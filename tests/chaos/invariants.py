"""What must hold whatever breaks, checked from outside: by the clock and the proxies' counters."""

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field

OVERRUN_S = 0.05
LONGEST_SILENCE_S = 5.0
# Fewer calls of the client in that time than this prove nothing of a node.
_LEAST_CALLS = 15
# From the end of a fault to its effects: a killed engine is missed a moment later.
_MARGIN_S = 0.5
ANSWERS = {"ok", "left", "200"}


@dataclass
class Report:
    """What happened to the calls, and what must not have happened. Times in seconds, memory in MB.

    `longest_silence`: of a healthy node without traffic. `machine`: figures of the machine meanwhile.
    """

    seed: int
    seconds: float
    outcomes: Counter = field(default_factory=Counter)
    faults: Counter = field(default_factory=Counter)
    violations: list = field(default_factory=list)
    overruns: list = field(default_factory=list)
    samples: dict = field(default_factory=dict)
    longest_silence: float = 0.0
    machine: dict = field(default_factory=dict)

    def violated(self, what):
        """Note a violation with the time since the start, for finding it in the schedule."""
        self.violations.append(what)

    @property
    def calls(self):
        return sum(self.outcomes.values())

    @property
    def answered(self):
        return sum(count for (_, outcome), count in self.outcomes.items() if outcome in ANSWERS)

    def __str__(self):
        rows = "\n".join(
            f"    {kind:14s} {outcome:22s} {n:6d}  {self.samples.get((kind, outcome), '')}"
            for (kind, outcome), n in sorted(self.outcomes.items())
        )
        verdict = "no violation" if not self.violations else f"{len(self.violations)} VIOLATIONS"
        return (
            f"seed {self.seed}, {self.seconds:.0f} s: {self.calls} calls, {self.answered} answered, "
            f"largest overrun {max(self.overruns, default=0.0) * 1e3:.0f} ms, "
            f"longest time without traffic {self.longest_silence:.1f} s: {verdict}\n"
            f"  faults {dict(self.faults)}\n  machine {self.machine}\n{rows}"
            + "".join(f"\n  VIOLATION {what}" for what in self.violations[:20])
        )


class TrafficWatch:
    """No healthy node goes without traffic for 5 seconds while the client makes calls. Faults of the caller (a frozen
    resolver, full pools) are no excuse.
    """

    def __init__(self, nodes, faults, report, began):
        self._nodes = nodes
        self._faults = faults
        self._report = report
        self._began = began
        self.calls = 0

    async def watch(self):
        await asyncio.gather(*(self._watch(node) for node in self._nodes))

    async def _watch(self, node):
        since, requests, calls = time.monotonic(), node.proxy.requests, 0
        while True:
            await asyncio.sleep(0.25)
            now = time.monotonic()
            if node.proxy.requests != requests or not await self._healthy(node, now):
                since, requests, calls = now, node.proxy.requests, self.calls
                continue
            if self.calls - calls <= _LEAST_CALLS:
                continue
            self._report.longest_silence = max(self._report.longest_silence, now - since)
            if now - since > LONGEST_SILENCE_S:
                self._report.violated(
                    f"{now - self._began:.1f} s: healthy node {node.number} got none of {self.calls - calls} calls in "
                    f"{now - since:.1f} s"
                )
                since, calls = now, self.calls

    async def _healthy(self, node, now):
        if node.one_fault.locked():
            return False
        at = now - self._began
        if any(f.node == node.number and f.at - _MARGIN_S <= at <= f.until + _MARGIN_S for f in self._faults):
            return False
        try:
            _, body = await asyncio.to_thread(node.node.health)
        except OSError as error:
            if not node.one_fault.locked():
                self._report.violated(
                    f"{at:.1f} s: node {node.number} does not answer /health, and nothing ails it: {error!r}"
                )
            return False
        return all(model["state"] == "ready" for model in body["models"])
