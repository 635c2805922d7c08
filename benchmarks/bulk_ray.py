"""Figures of data sets on Ray: run with an interpreter that has Ray (tests/integrations/environments/bulk_ray.txt).

    PYTHONPATH=. PYTHON_WITH_RAY benchmarks/bulk_ray.py

A cluster of a head and three machines on this one, over made-up nodes: 20,000 empty fragments (target ≥ 500/s, driver
≤ +100 MB), and the same job by the event loop of one process and by Ray (target ≥ 0.9).
"""

import asyncio
import os
import secrets
import tempfile
import time
from pathlib import Path

os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}

import psutil
from ray.cluster_utils import Cluster

from backend_client.bulk import run_job
from backend_client.bulk.inputs import list_inputs
from backend_client.bulk.output import Progress, Receipt
from backend_client.bulk.ray_executor import RESOURCE, RayExecutor
from backend_client.bulk.run import Driver
from backend_client.bulk.worker import Worker
from backend_client.settings import ClientSettings
from benchmarks.bulk_parts import empty_fragments, made_up_nodes, make_input, request_for

FRAGMENTS = 20_000
RATE = 1000.0


def commit_nothing(request, nodes, job, fragment):  # noqa: ARG001
    """What is left is Ray and the driver."""
    return Receipt(fragment=fragment.id, rows=0, rejected=0)


async def empty(cluster, folder):
    source = make_input(folder / "small.parquet", 10)
    request = request_for(source, folder / "empty")
    settings = ClientSettings.load(nodes=["http://127.0.0.1:1"])
    await RayExecutor.connect(cluster.address, request, settings)
    executor = RayExecutor(request, (), commit_nothing)
    fragments = empty_fragments(list_inputs(str(source))[0], FRAGMENTS)
    progress = Progress(len(fragments))
    driver = Driver(executor, None, progress, attempts=3, report=lambda _: None, check=lambda: None)
    process = psutil.Process()
    before, began = process.memory_info().rss, time.perf_counter()
    await driver.run(fragments)
    seconds = time.perf_counter() - began
    grown = (process.memory_info().rss - before) / 1e6
    assert progress.done == FRAGMENTS
    await executor.close()
    print(f"empty: {FRAGMENTS / seconds:.0f} fragments/s (target ≥ 500), driver +{grown:.0f} MB (target ≤ 100)")


async def compared(cluster, folder, rows=90_000):
    source = make_input(folder / "in.parquet", rows, row_group=1000)
    ratios = []
    whole = []
    with made_up_nodes(3, RATE) as (_, urls):
        settings = ClientSettings.load(nodes=urls)
        for number in range(3):
            seconds, working = [], []
            for name in ("asyncio", "ray"):
                request = request_for(source, folder / f"{name}{number}", rows_per_fragment=5000)
                executor = await RayExecutor.connect(cluster.address, request, settings) if name == "ray" else None
                executor = executor or Worker(request, settings)
                ready = noting_when_ready(executor)
                began = time.perf_counter()
                report = await run_job(request, settings, executor=executor)
                seconds.append(time.perf_counter() - began)
                working.append(time.perf_counter() - ready[-1])
                assert report.rows == rows
            ratios.append(working[0] / working[1])
            whole.append(seconds[0] / seconds[1])
            starts = [round(all_ - at_work, 1) for all_, at_work in zip(seconds, working, strict=True)]
            rates = [round(rows / at_work) for at_work in working]
            print(f"  asyncio and Ray {rates} rows/s: {ratios[-1]:.3f}; seconds to start {starts}")
    print(
        f"compared: Ray ÷ asyncio at work {sorted(ratios)[1]:.3f} (target ≥ 0.9), with the start {sorted(whole)[1]:.3f}"
    )


def noting_when_ready(executor):
    """The time at which the executor got its first fragment, in a list."""
    times = []
    submit = executor.submit

    async def noting(job, fragment):
        if not times:
            times.append(time.perf_counter())
        return await submit(job, fragment)

    executor.submit = noting
    return times


async def main(folder):
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(3):
            cluster.add_node(num_cpus=1, resources={RESOURCE: 1})
        await empty(cluster, folder)
        await compared(cluster, folder)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(main(Path(directory)))
