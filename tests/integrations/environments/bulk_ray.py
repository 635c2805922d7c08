"""Data sets on a Ray cluster of a head and three machines, with processes and machines killed while they work.

Runs in an environment of its own (bulk_ray.txt), which tests/integrations/test_bulk_environments.py makes.
Prints a line for each scenario.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import tempfile
from pathlib import Path

os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}

import psutil
from ray.cluster_utils import Cluster

from backend_client.bulk import BulkRequest, ExitCode, run_job
from backend_client.bulk.ray_executor import RESOURCE, RayExecutor, process_fragment
from backend_client.settings import ClientSettings
from backend_client.testing import FakeFleet
from tests.faults.bulk.data_sets import assert_whole, make_input, rows_of


def dying(request, nodes, job, fragment):
    """Dies with every fragment that begins at row 150 of the Parquet file."""
    if fragment.file.form == "parquet" and fragment.start == 150:
        os.kill(os.getpid(), signal.SIGKILL)
    return process_fragment(request, nodes, job, fragment)


@contextlib.contextmanager
def cluster_of(machines):
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        yield cluster, [cluster.add_node(num_cpus=1, resources={RESOURCE: 1}) for _ in range(machines)]
    finally:
        cluster.shutdown()


def workers():
    """The processes of this process's cluster that work on a fragment, or have."""
    found = psutil.Process().children(recursive=True)
    return [process for process in found if "process_fragment" in _title(process)]


def _title(process):
    with contextlib.suppress(psutil.Error):
        return " ".join(part for part in process.cmdline() if "ray::" in part)
    return ""


async def run(cluster, source, out, fleet, *, process=None, on_progress=None):
    request = BulkRequest(
        kind="embed", source=str(source), out=str(out), column="text", rows_per_fragment=25, max_rejected=0.1
    )
    settings = ClientSettings.load(nodes=fleet.urls)
    executor = await RayExecutor.connect(cluster.address, request, settings)
    if process is not None:
        executor = RayExecutor(request, settings.nodes, process)
    return await run_job(request, settings, executor=executor, on_progress=on_progress)


async def undisturbed(cluster, source, texts, out, fleet):
    report = await run(cluster, source, out, fleet)
    assert (report.exit_code, report.lost) == (ExitCode.COMPLETE, 0), report
    assert_whole(out, texts)
    return "undisturbed: every row once"


async def killed_workers(cluster, source, texts, out, fleet):
    killed = []

    def kill_one(progress):
        busy = workers()
        if busy and len(killed) < 3 and progress.done >= 5 * (len(killed) + 1):
            busy[0].kill()
            killed.append(busy[0].pid)

    report = await run(cluster, source, out, fleet, on_progress=kill_one)
    assert report.exit_code is ExitCode.COMPLETE, report
    assert len(killed) == 3
    assert report.lost >= 1, report
    assert_whole(out, texts)
    return f"three processes killed: every row once, {report.lost} deaths noticed, {report.failures} fragments again"


async def poisonous_fragment(cluster, source, texts, out, fleet):
    report = await run(cluster, source, out, fleet, process=dying)
    assert report.exit_code is ExitCode.QUARANTINED, report
    ((_, reason),) = report.quarantined.items()
    assert " 150-175: its worker died" in reason, reason
    assert len(rows_of(out)) == len(texts) - 25
    first = f"a fragment that kills its process: quarantined after {report.lost} deaths, all others done"
    report = await run(cluster, source, out, fleet)
    assert report.exit_code is ExitCode.COMPLETE, report
    assert_whole(out, texts)
    return first


async def removed_machine(cluster, source, texts, out, fleet, machine):
    removed = []

    def remove(progress):
        if progress.done >= 8 and not removed:
            removed.append(machine)
            cluster.remove_node(machine, allow_graceful=False)

    report = await run(cluster, source, out, fleet, on_progress=remove)
    assert removed
    assert report.exit_code is ExitCode.COMPLETE, report
    assert_whole(out, texts)
    return f"a machine removed: every row once, {report.lost} deaths noticed"


async def added_machine(cluster, source, texts, out, fleet):
    added = []

    def add(progress):
        if progress.done >= 3 and not added:
            added.append(cluster.add_node(num_cpus=1, resources={RESOURCE: 1}))

    report = await run(cluster, source, out, fleet, on_progress=add)
    assert report.exit_code is ExitCode.COMPLETE, report
    assert_whole(out, texts)
    return "a machine added: every row once"


async def scenarios(folder):
    source = folder / "in"
    texts = make_input(source)
    with FakeFleet(3) as fleet, cluster_of(3) as (cluster, machines):
        print(await undisturbed(cluster, source, texts, folder / "plain", fleet), flush=True)
        print(await killed_workers(cluster, source, texts, folder / "killed", fleet), flush=True)
        print(await poisonous_fragment(cluster, source, texts, folder / "poison", fleet), flush=True)
        print(await removed_machine(cluster, source, texts, folder / "machine", fleet, machines[0]), flush=True)
        print(await added_machine(cluster, source, texts, folder / "joined", fleet), flush=True)
        _, alive = psutil.wait_procs(workers(), timeout=20)
        assert not alive, f"processes outlive their driver: {alive}"
    print("all as expected")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(scenarios(Path(directory)))
