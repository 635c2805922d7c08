"""`python -m benchmarks [NAME …] [--quick] [--json FILE]`: run the benchmarks against a node that it starts.

A name stands for all that begin with it: `client` for each of the client's.
"""

import argparse
import asyncio
import json
from pathlib import Path

from benchmarks import (
    client_faults,
    client_overhead,
    client_selection,
    dialects,
    edge_cpu,
    embeddings,
    event_loop,
    footprint,
    generation,
    overload,
    prefix,
)
from benchmarks.harness import GUARD
from benchmarks.quiet import describe_machine
from tests.support.nodes import start_node
from worker_node.models.store import ModelStore

BENCHMARKS = {
    "embeddings": embeddings.run,
    "generation": generation.run,
    "event-loop": event_loop.run,
    "overload": overload.run,
    "footprint": footprint.run,
    "dialects": dialects.run,
    "edge-cpu": edge_cpu.run,
    "prefix": prefix.run,
    "client-overhead": client_overhead.run,
    "client-selection": client_selection.run,
    "client-faults": client_faults.run,
}


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
    options = parser.parse_args()
    chosen = [name for name in BENCHMARKS if not options.names or name.startswith(tuple(options.names))]
    if unknown := [given for given in options.names if not any(name.startswith(given) for name in chosen)]:
        parser.error(f"unknown: {', '.join(unknown)}")
    GUARD.patience_s = (0.0 if options.quick else 300.0) if options.patience is None else options.patience
    store = ModelStore()
    machine = describe_machine()
    print(", ".join(f"{name}: {value}" for name, value in machine.items()), flush=True)
    results = {"machine": machine, "figures": {}}
    with start_node("--log-level", "warning", NPU_NODE_EMBEDDING_CACHE="0") as node:
        for name in chosen:
            results["figures"][name] = asyncio.run(BENCHMARKS[name](node, store, options.quick))
    print(GUARD.line())
    results["quiet"] = {"measured": GUARD.measured, "disturbed": GUARD.disturbed, "worst": round(GUARD.worst, 3)}
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


main()
