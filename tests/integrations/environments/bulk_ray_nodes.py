"""Data sets on a Ray cluster of two machines whose actors start real nodes (`--start-nodes`), with both killed.

Runs in an environment of its own (bulk_ray.txt), which tests/integrations/test_bulk_environments.py makes.
Prints a line for each scenario.
"""

import asyncio
import os
import secrets
import signal
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

# What an image of a node sets for a node that serves its network, and a machine for clients of other nodes: none of it
# may reach the node of an actor, or keep its actor from it.
os.environ |= {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "NPU_NODE_MODELS": '[{"name": "all-minilm-l6-v2", "placements": ["CPU"]}]',
    "NPU_NODE_HOST": "0.0.0.0",  # noqa: S104
    "NPU_NODE_OLLAMA_PORT": "1",
    "NPU_CLIENT_API_KEY": "of-other-nodes",
}

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import ray
from ray.cluster_utils import Cluster

from backend_client.bulk import BulkRequest, ExitCode, run_job
from backend_client.bulk.ray_executor import OPTIONS, RESOURCE, Actor, RayExecutor
from backend_client.errors import NPUUnavailableError
from backend_client.settings import ClientSettings
from tests.faults.bulk.data_sets import rows_of

ROWS, MACHINES = 600, 2
# For hangs only: a node loads a model, and a machine may be busy.
HANG_S = 120


class BrokenActor(Actor):
    """On a machine whose settings no node starts with."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        os.environ["NPU_NODE_MODELS"] = "not JSON"


def processes(word):
    """The processes below this one whose command line has a word."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if any(word in part for part in process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def nodes():
    return [process for process in processes("worker_node") if "serve" in process.cmdline()]


def engines(node):
    return [child for child in node.children(recursive=True) if "worker_node.engines.child" in child.cmdline()]


def gone(found):
    """All processes have ended, by themselves."""
    _, alive = psutil.wait_procs(found, timeout=HANG_S)
    assert not alive, alive


async def run(cluster, source, out, *, actor=Actor, patience=600.0, on_progress=None):
    request = BulkRequest(
        kind="embed", source=str(source), out=str(out), column="text", rows_per_fragment=20, patience=patience
    )
    settings = ClientSettings.load(nodes=("http://127.0.0.1:9",))
    executor = await RayExecutor.connect(cluster.address, request, settings, start_nodes=True)
    if actor is not Actor:
        remote = ray.remote(actor).options(**OPTIONS)
        make = lambda: remote.remote(request, settings.nodes, start_node=True)  # noqa: E731
        executor = RayExecutor(make, executor.count, patience)
    return await run_job(request, settings, executor=executor, on_progress=on_progress)


def assert_whole(out, expected=None):
    found = rows_of(out)
    assert sorted(found) == sorted(f"row {number}" for number in range(ROWS))
    for text, row in found.items():
        vector = np.array(row["embeddings"])
        assert vector.shape == (384,)
        assert (row["device"], row["emulated"]) == ("CPU", False)
        assert expected is None or vector @ np.array(expected[text]["embeddings"]) > 0.9999, text
    return found


def look_at(node):
    """It listens on this machine only, on one port, and serves nobody without its key."""
    (address,) = {
        connection.laddr for connection in node.net_connections("tcp") if connection.status == psutil.CONN_LISTEN
    }
    assert address.ip == "127.0.0.1", address
    for key in ("", "of-other-nodes"):
        request = urllib.request.Request(
            f"http://127.0.0.1:{address.port}/models", headers={"Authorization": f"Bearer {key}"}
        )
        status = 200
        try:
            urllib.request.urlopen(request, timeout=HANG_S).close()  # noqa: S310
        except urllib.error.HTTPError as error:
            status = error.code
        assert status == 401


async def undisturbed(cluster, source, out):
    seen = {}

    def look(progress):
        if progress.done >= 3:
            for node in nodes():
                if node.pid not in seen:
                    look_at(node)
                    seen[node.pid] = [node, *engines(node)]

    report = await run(cluster, source, out, on_progress=look)
    assert (report.exit_code, report.lost) == (ExitCode.COMPLETE, 0), report
    assert len(seen) <= MACHINES, f"{len(seen)} nodes on {MACHINES} machines"
    assert any(len(found) > 1 for found in seen.values()), seen
    gone([process for found in seen.values() for process in found])
    return assert_whole(out), f"real nodes, on loopback and with a key each: {len(seen)} of {MACHINES} seen, all ended"


async def killed(cluster, source, out, expected, name, victims):
    """One of the `victims`, processes that hold or are a node, is killed in the middle."""
    killed = []

    def kill_one(progress):
        if progress.done >= 5 and not killed and victims():
            victim = victims()[0]
            below = [child for node in nodes() if victim in (node, node.parent()) for child in [node, *engines(node)]]
            assert len(below) >= 2, below
            os.kill(victim.pid, signal.SIGKILL)
            killed.extend(below)

    report = await run(cluster, source, out, on_progress=kill_one)
    assert killed
    assert report.exit_code is ExitCode.COMPLETE, report
    gone(killed)
    assert_whole(out, expected)
    return f"{name} killed: its node and engines ended, every row once, {report.lost} deaths noticed"


async def broken(cluster, source, out):
    problem = ""
    try:
        await run(cluster, source, out, actor=BrokenActor, patience=10.0)
    except NPUUnavailableError as error:
        problem = str(error)
    assert "NPU_NODE_MODELS" in problem, problem
    return "nodes that do not start: the job ends with their message when its patience does"


async def scenarios(folder):
    source = folder / "in"
    source.mkdir()
    pq.write_table(pa.table({"text": [f"row {number}" for number in range(ROWS)]}), source / "a.parquet")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(MACHINES):
            cluster.add_node(num_cpus=1, resources={RESOURCE: 1})
        expected, line = await undisturbed(cluster, source, folder / "plain")
        print(line, flush=True)
        holders = lambda: [node.parent() for node in nodes()]  # noqa: E731
        print(await killed(cluster, source, folder / "actor", expected, "an actor", holders), flush=True)
        print(await killed(cluster, source, folder / "node", expected, "a node", nodes), flush=True)
        print(await broken(cluster, source, folder / "broken"), flush=True)
        gone([*nodes(), *processes("worker_node.engines.child")])
    finally:
        cluster.shutdown()
    print("all as expected")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(scenarios(Path(directory)))
