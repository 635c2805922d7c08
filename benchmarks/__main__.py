"""`python -m benchmarks [NAME …] [--quick] [--json FILE]`: run the benchmarks against a node that it starts.

A name stands for all that begin with it: `client` for each of the client's.
"""

import argparse
import asyncio
import contextlib
import functools
import json
from pathlib import Path

from benchmarks import (
    affinity,
    client_overhead,
    client_selection,
    curves,
    dialects,
    edge_cpu,
    embeddings,
    event_loop,
    footprint,
    gateway,
    generation,
    overload,
    page,
    peers,
    prefix,
)
from benchmarks.curves.plot import load_pyplot
from benchmarks.harness import GUARD
from benchmarks.node import start_node
from benchmarks.quiet import describe_machine
from worker_node.models.store import ModelStore

BENCHMARKS = {
    "embeddings": embeddings.run,
    "embeddings-npu": embeddings.on_npu,
    "generation": generation.run,
    "event-loop": event_loop.run,
    "overload": overload.run,
    "footprint": footprint.run,
    "dialects": dialects.run,
    "edge-cpu": edge_cpu.run,
    "prefix": prefix.run,
    "prefix-npu": prefix.conversations,
    "peers": peers.run,
    "client-overhead": client_overhead.run,
    "client-selection": client_selection.run,
    "gateway": gateway.run,
    "affinity": affinity.run,
    **curves.RUNS,
}
# Those that start nodes of their own, or need none.
ALONE = {*curves.RUNS, "client-selection", "embeddings-npu", "prefix-npu", "affinity"}


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; all if none is given")
    parser.add_argument(
        "--quick", action="store_true", help="less work and fewer rounds: a look, not a figure to quote"
    )
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument(
        "--patience",
        type=float,
        metavar="SECONDS",
        help="how long to wait in all for other processes to be quiet, and to repeat what they disturbed "
        "(300; 0 with --quick)",
    )
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=URL",
        help="a server on this machine with an OpenAI-compatible API, for the benchmark `peers`; can be given again",
    )
    parser.add_argument(
        "--soak",
        type=float,
        metavar="MINUTES",
        help="with `gateway`: its memory every minute under a light load, in place of its figures",
    )
    parser.add_argument("--page", type=Path, metavar="DIRECTORY", help="write a page with plots there (matplotlib)")
    options = parser.parse_args()
    for peer in options.peer:
        name, separator, url = peer.partition("=")
        if not separator or not url.startswith(("http://", "https://")):
            parser.error(f"--peer {peer}: write NAME=URL, such as llama-server=http://127.0.0.1:8080")
        peers.PEERS[name] = url
    if absent := asyncio.run(peers.unreachable()):
        parser.error(f"no OpenAI-compatible server lists a model at: {', '.join(absent)}")
    chosen = [name for name in BENCHMARKS if not options.names or name.startswith(tuple(options.names))]
    if unknown := [given for given in options.names if not any(name.startswith(given) for name in chosen)]:
        parser.error(f"unknown: {', '.join(unknown)}")
    if options.soak:
        if chosen != ["gateway"]:
            parser.error("--soak is for the benchmark `gateway` alone: write `gateway --soak MINUTES`")
        BENCHMARKS["gateway"] = functools.partial(gateway.soak, minutes=options.soak)
    if options.page:
        load_pyplot()
    GUARD.patience_s = (0.0 if options.quick else 300.0) if options.patience is None else options.patience
    store = ModelStore()
    machine = describe_machine()
    print(", ".join(f"{name}: {value}" for name, value in machine.items()), flush=True)
    results = {"machine": machine, "figures": {}}
    shared = start_node("--log-level", "warning", NPU_NODE_EMBEDDING_CACHE="0")
    with shared if set(chosen) - ALONE else contextlib.nullcontext() as node:
        for name in chosen:
            results["figures"][name] = asyncio.run(BENCHMARKS[name](node, store, options.quick))
    print(GUARD.line())
    results["quiet"] = {
        "line": GUARD.line(),
        "measured": GUARD.measured,
        "disturbed": GUARD.disturbed,
        "worst": round(GUARD.worst, 3),
    }
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    if options.page:
        print(f"written: {page.write(options.page, results)}")


main()
