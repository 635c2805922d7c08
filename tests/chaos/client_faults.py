"""What callers notice when nodes of three break: errors, added latency, extra load, and how soon all serve again.

    python -m tests.chaos.client_faults

Each fault strikes under a steady load, through one client that lives as long as all of them. A call's time runs from
when it was due, so that no delay hides others. Rolling restart: each node is drained, ended and started anew, in turn.
"""

import asyncio
import logging
import time
from dataclasses import dataclass

import numpy as np

from backend_client import NPUClient
from tests.support.fleet import Load, real_fleet

RATE = 40
TIMEOUT_S = 10.0
SLOW_S = 0.1


@dataclass(frozen=True)
class Outcome:
    """Times in milliseconds but `recovery_s`: from when the node could serve again until it did. `load`: requests that
    nodes may have seen ÷ calls.
    """

    fault: str
    calls: int
    failed: int
    p50: float
    p99: float
    longest: float
    load: float
    recovery_s: float | None

    def line(self, healthy):
        share = self.failed / self.calls
        recovery = "" if self.recovery_s is None else f"   serves again after {self.recovery_s:.2f} s"
        return (
            f"  {self.fault:26s} {self.calls:5d} calls, {self.failed} failed ({share:.2%})   "
            f"p50 {self.p50:6.1f} ms ({self.p50 - healthy.p50:+.1f})   p99 {self.p99:7.1f} ms "
            f"({self.p99 - healthy.p99:+.1f})   longest {self.longest:7.1f} ms   load × {self.load:.3f}{recovery}"
        )


async def run(seconds):
    """Measure and print."""
    outcomes = []
    logging.getLogger("backend_client").setLevel(logging.ERROR)
    print(f"Faults in a fleet of three, {RATE} embeddings a second, {seconds} s each")
    async with real_fleet(3) as nodes, NPUClient([node.url for node in nodes]) as client:
        await client.health()
        for fault, (strike, mend) in FAULTS.items():
            load = Load(client, rate=RATE, timeout=TIMEOUT_S)
            await load.more(RATE)
            since = time.monotonic()
            await strike(nodes, load, seconds)
            until = time.monotonic()
            recovery = await mend(nodes, load)
            await load.drained()
            outcomes.append(_outcome(fault, load, since, until, recovery))
            print(outcomes[-1].line(outcomes[0]), flush=True)


def _outcome(fault, load, since, until, recovery):
    """Times are of the calls that were due while the fault lasted; a node that starts takes the others' processor."""
    milliseconds = [record.seconds * 1e3 for record in load.records if since <= record.due < until]
    p50, p99 = np.percentile(milliseconds, (50, 99))
    calls = len(load.records)
    sent = sum(record.sent for record in load.records)
    return Outcome(fault, calls, len(load.errors), float(p50), float(p99), max(milliseconds), sent / calls, recovery)


async def _nothing(_nodes, _load, seconds=0):
    await asyncio.sleep(seconds)


async def _killed(nodes, _load, seconds):
    await nodes[0].kill()
    await asyncio.sleep(seconds)


async def _start(nodes, load):
    await nodes[0].start()
    return await _seconds_until_it_serves(nodes[0], load)


async def _frozen(nodes, _load, seconds):
    nodes[1].freeze()
    await asyncio.sleep(seconds)


async def _thaw(nodes, load):
    nodes[1].thaw()
    return await _seconds_until_it_serves(nodes[1], load)


async def _slow(nodes, _load, seconds):
    nodes[2].slow(SLOW_S)
    await asyncio.sleep(seconds)


async def _speed_up(nodes, _load):
    nodes[2].slow(0)


async def _all_three(nodes, _load, seconds):
    nodes[2].slow(SLOW_S)
    await nodes[0].kill()
    nodes[1].freeze()
    await asyncio.sleep(seconds)


async def _mend_all(nodes, load):
    recoveries = await _thaw(nodes, load), await _start(nodes, load)
    nodes[2].slow(0)
    return max(recoveries)


async def _restarted(nodes, load, _seconds):
    for node in nodes:
        await node.terminate()
        await node.start()
        await load.served_by(node)


async def _seconds_until_it_serves(node, load):
    began = time.monotonic()
    await load.served_by(node)
    return time.monotonic() - began


FAULTS = {
    "none": (_nothing, _nothing),
    "one killed −9": (_killed, _start),
    "one frozen (SIGSTOP)": (_frozen, _thaw),
    "one slow by 100 ms": (_slow, _speed_up),
    "all three of these at once": (_all_three, _mend_all),
    "rolling restart of all": (_restarted, _nothing),
}


if __name__ == "__main__":
    asyncio.run(run(seconds=15))
