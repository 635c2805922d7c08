"""One run of one seed: the world, the load, the faults, and a look at what is left behind."""

import asyncio
import gc
import os
import time

import psutil

from backend_client import ClientOptions, NPUClient
from tests.chaos.invariants import Report, TrafficWatch
from tests.chaos.lateness import Lateness
from tests.chaos.leaks import ClientBaseline, NodeBaseline
from tests.chaos.load import Load
from tests.chaos.ranking import RERANKER, rankings
from tests.chaos.schedule import WARM_UP_S, schedule
from tests.chaos.world import FLEET_NAME, HOSTS, FrozenResolver, world

RATE = 8.0
# More calls than connections are allowed, so that pools are full. So many begin in one turn of the loop: all at once
# would make it a long one, which is the caller's doing and not the client's.
CONNECTIONS_PER_NODE = 8
BURST = 100
AT_ONCE = 2


async def run(seed, seconds, root, store, *, rate=RATE, log=None):
    report = Report(seed, seconds)
    faults = schedule(seed, seconds)
    async with world(root, store) as (nodes, proxies, port):
        resolver = FrozenResolver(HOSTS)
        references = await asyncio.to_thread(Load.references, seed, nodes[0].store)
        ranked = await asyncio.to_thread(rankings, seed, root / RERANKER)
        before = [NodeBaseline(node) for node in nodes]
        ours = ClientBaseline()
        # This process's own modules make a full collection long, and that would be the harness's lateness.
        gc.collect()
        gc.freeze()
        lateness = Lateness()
        with resolver.installed():
            client = NPUClient(
                [f"dns://{FLEET_NAME}:{port}"], options=ClientOptions(connections_per_node=CONNECTIONS_PER_NODE)
            )
            load = Load(client, nodes, references, ranked, report, lateness, seed)
            load.began = began = time.monotonic()
            traffic = TrafficWatch(nodes, faults, report, began)
            watchers = [
                asyncio.create_task(watch)
                for watch in (lateness.watch(), traffic.watch(), proxies.watch(), _machine(report), _warm(ours))
            ]

            def counted():
                traffic.calls += 1

            async with client:
                async with asyncio.TaskGroup() as group:
                    group.create_task(load.run(seconds, rate, counted))
                    for fault in faults:
                        group.create_task(_strike(fault, nodes, load, resolver, report, began, log))
                for watcher in watchers:
                    watcher.cancel()
                await asyncio.gather(*watchers, return_exceptions=True)
        report.machine["longest wait for a core"] = f"{lateness.longest_wait * 1e3:.0f} ms"
        for problem in await asyncio.gather(*(baseline.left() for baseline in before)):
            if problem:
                report.violated(problem)
        for problem in ours.left(HOSTS):
            report.violated(f"left of the closed client: {problem}")
    return report


async def _machine(report):
    loads = []
    while True:
        loads.append(psutil.getloadavg()[0])
        report.machine["load"] = round(sum(loads) / len(loads), 1)
        await asyncio.sleep(5)


async def _warm(ours):
    await asyncio.sleep(WARM_UP_S)
    ours.warmed_up()


async def _strike(fault, nodes, load, resolver, report, began, log):
    await asyncio.sleep(max(0.0, began + fault.at - time.monotonic()))
    if log:
        log(str(fault))
    report.faults[fault.kind] += 1
    if fault.node is not None:
        node = nodes[fault.node]
        # On a busy machine a restart takes longer than the schedule allows for: one fault at a time on a node.
        async with node.one_fault:
            await getattr(node, fault.kind)(fault.seconds, fault.detail)
    elif fault.kind == "frozen_resolver":
        resolver.freeze()
        await asyncio.sleep(fault.seconds)
        resolver.thaw()
    elif fault.kind == "event_loop_stall":
        stalled = time.monotonic()
        time.sleep(fault.seconds)  # noqa: ASYNC251  (that is the fault)
        load.lateness.stalled(stalled, time.monotonic())
    else:
        async with asyncio.TaskGroup() as group:
            for number in range(BURST):
                group.create_task(load.call(load.embed, timeout=20.0))
                if number % AT_ONCE == 0:
                    await asyncio.sleep(0)


def seeds_from(first, count):
    """Seeds to run: `first`, or one of the machine's choice, and those after it."""
    start = int.from_bytes(os.urandom(4)) if first is None else first
    return range(start, start + count)
