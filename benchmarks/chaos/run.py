"""One run of one seed: the world, the load, the faults, and a look at what is left behind."""

import asyncio
import contextlib
import os
import time

import psutil

from backend_client import NPUClient
from benchmarks.chaos.invariants import LoopLag, References, Report, TrafficWatch
from benchmarks.chaos.load import Load
from benchmarks.chaos.schedule import NODES, schedule
from benchmarks.chaos.world import FLEET_NAME, FrozenResolver, world

RATE = 8.0
BURST = 300
SETTLE_S = 30.0


async def run(seed, seconds, root, store, *, rate=RATE, log=None):
    """Run a seed for so many seconds in the directory `root`; returns the report."""
    report = Report(seed, seconds)
    faults = schedule(seed, seconds)
    tasks_before = asyncio.all_tasks()
    async with world(root, store) as (nodes, port):
        descriptors = {node.number: node.process.num_fds() for node in nodes}
        resolver = FrozenResolver([f"127.0.0.{number + 2}" for number in range(NODES)])
        lag = LoopLag()
        with resolver.installed():
            client = NPUClient([f"dns://{FLEET_NAME}:{port}"])
            load = Load(client, nodes, References(), report, lag, seed)
            await load.take_references(nodes[0].node.url)
            load.began = began = time.monotonic()
            traffic = TrafficWatch(nodes, faults, report, began)
            watchers = [asyncio.create_task(lag.watch()), asyncio.create_task(traffic.watch())]

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
        await _nothing_left(nodes, descriptors, report)
    await asyncio.sleep(0.1)
    left = asyncio.all_tasks() - tasks_before
    if left:
        report.violated(f"tasks left after close: {[task.get_name() for task in left]}")
    return report


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
        time.sleep(fault.seconds)  # noqa: ASYNC251  (that is the fault)
    else:
        await asyncio.gather(*(load.call(load.embed, timeout=20.0) for _ in range(BURST)))


async def _nothing_left(nodes, descriptors, report):
    """After the load: our connections are closed; every node is idle, has each engine once, and no more descriptors."""
    ours = [
        c
        for c in psutil.Process().net_connections("tcp")
        if c.raddr and c.raddr.ip in {f"127.0.0.{n + 2}" for n in range(NODES)}
    ]
    open_ones = [c for c in ours if c.status == "ESTABLISHED" and c.laddr.ip == "127.0.0.1"]
    if open_ones:
        report.violated(f"{len(open_ones)} connections of the client are still open")
    deadline = time.monotonic() + SETTLE_S
    for node in nodes:
        problem = "it does not answer"
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                problem = await asyncio.to_thread(_unsettled, node, descriptors[node.number])
                if problem is None:
                    break
            await asyncio.sleep(0.25)
        if problem is not None:
            report.violated(f"node {node.number}, {SETTLE_S:.0f} s after the load: {problem}")


def _unsettled(node, descriptors):
    status, body = node.node.health()
    if status != 200 or body["status"] != "ready":
        return f"/health is {status} {body.get('status')} {[(m['id'], m['state']) for m in body.get('models', [])]}"
    for model in body["models"]:
        if model["in_flight"] or model["queue_depth"]:
            return f"{model['id']} has {model['in_flight']} jobs in flight, {model['queue_depth']} waiting"
    wanted = {engine["pid"] for model in body["models"] for engine in model["engines"] if engine["pid"]}
    children = {
        child.pid for child in node.process.children() if "worker_node.hosting.child" in " ".join(child.cmdline())
    }
    if children - wanted:
        return f"{len(children - wanted)} engine processes that it does not know of"
    if (now := node.process.num_fds()) > descriptors + 24:
        return f"{now} descriptors, {descriptors} before the load"
    return None


def seeds_from(first, count):
    """Seeds to run: `first`, or one of the machine's choice, and those after it."""
    start = int.from_bytes(os.urandom(4)) if first is None else first
    return range(start, start + count)
