"""Figures of data sets over a fleet: `python -m benchmarks.bulk [NAME …] [--quick]`; docs/cluster.md quotes them.

real      a job on one real node ÷ `embed_many` of the same texts, in turn (target ≥ 0.95)
killed    three made-up nodes of which one is killed after a third of the rows ÷ the ideal time (target ≤ 1.15)
resume    seconds to find 20,000 finished fragments and complete the job (target ≤ 5)
cpu       processor time of the client for a row, made-up nodes (target ≤ 15 µs), and of `embed_many` beside it
memory    peak memory of processes with 10⁴, 10⁵ and 10⁶ rows (target: flat)

Ray has a file of its own, benchmarks/bulk_ray.py: it runs in an environment with Ray.
"""

import argparse
import asyncio
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from backend_client import NPUClient
from backend_client.bulk import run_job
from backend_client.settings import ClientSettings
from benchmarks.bulk_parts import (
    ROOT,
    complete_output,
    made_up_nodes,
    make_input,
    make_texts,
    request_for,
    timed,
)


async def real(folder, quick):
    from benchmarks.node import start_node

    rows, rounds = (1500, 2) if quick else (6000, 5)
    texts = make_texts(rows)
    source = make_input(folder / "in.parquet", rows, row_group=1000)
    ratios = []
    with start_node("--log-level", "warning", NPU_NODE_EMBEDDING_CACHE="0") as node:

        async def many():
            async with NPUClient([node.url]) as client:
                began = time.perf_counter()
                await client.embed_many(texts, priority="batch", timeout=600)
                return rows / (time.perf_counter() - began)

        async def job(number):
            began = time.perf_counter()
            report = await timed(source, folder / f"out{number}", [node.url], rows_per_fragment=1000)
            assert report.rows == rows
            return rows / (time.perf_counter() - began)

        await many()
        for number in range(rounds):
            before, rate, after = await many(), await job(number), await many()
            ratios.append(rate / ((before + after) / 2))
            print(f"  embed_many {before:.0f}, job {rate:.0f}, embed_many {after:.0f} texts/s: {ratios[-1]:.3f}")
    print(f"real: job ÷ embed_many {statistics.median(ratios):.3f} (target ≥ 0.95)")


async def killed(folder, quick):
    rows = 12_000 if quick else 36_000
    source = make_input(folder / "in.parquet", rows, row_group=1000)
    for kill in (False, True):
        seconds, ideal = await three_nodes(source, folder / f"out-{kill}", rows, kill=kill)
        name = "one of three killed" if kill else "three nodes"
        print(f"killed: {name}: {seconds:.2f} s, ideal {ideal:.2f} s: {seconds / ideal:.3f} (target ≤ 1.15)")


async def three_nodes(source, out, rows, *, kill, rate=800.0):
    """Seconds of a job, and the least that they can be; with `kill`, one node dies after a third of the rows."""
    with made_up_nodes(3, rate) as (nodes, urls):
        began = time.perf_counter()
        gone = []

        def on_progress(progress):
            if kill and not gone and progress.rows_now >= rows / 3:
                nodes[0].kill()
                gone.append(time.perf_counter() - began)

        request = request_for(source, out, rows_per_fragment=1000)
        report = await run_job(request, ClientSettings.load(nodes=urls), on_progress=on_progress)
        seconds = time.perf_counter() - began
    assert report.rows == rows
    return seconds, gone[0] + (rows - 3 * rate * gone[0]) / (2 * rate) if gone else rows / (3 * rate)


async def resume(folder, quick):
    fragments = 2000 if quick else 20_000
    source = make_input(folder / "in.parquet", 10)
    out = folder / "out"
    request = complete_output(source, out, fragments)
    for what in ("first", "again"):
        began = time.perf_counter()
        report = await run_job(request, ClientSettings.load(nodes=["http://127.0.0.1:1"]))
        seconds = time.perf_counter() - began
        assert report.success
        assert report.done == fragments
        print(f"resume: {fragments} finished fragments, {what}: {seconds:.2f} s (target ≤ 5)")


async def cpu(folder, quick):
    rows = 50_000 if quick else 200_000
    source = make_input(folder / "in.parquet", rows)
    texts = make_texts(rows)
    with made_up_nodes(2) as (_, urls):
        async with NPUClient(urls) as client:
            await client.embed_many(texts[:5000])
            began = time.process_time()
            await client.embed_many(texts, timeout=600)
            many = (time.process_time() - began) / rows * 1e6
        await timed(source, folder / "warm", urls)
        began, wall = time.process_time(), time.perf_counter()
        report = await timed(source, folder / "out", urls)
        used = (time.process_time() - began) / rows * 1e6
        rate = rows / (time.perf_counter() - wall)
    assert report.rows == rows
    print(f"cpu: {used:.1f} µs a row (target ≤ 15), {rate:.0f} rows/s; embed_many {many:.1f} µs a row")


async def one_size(source, out, url):
    await timed(source, out, [url])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


async def memory(folder, quick):
    with made_up_nodes(1) as (_, urls):
        for exponent in (3, 4, 5) if quick else (4, 5, 6):
            source = make_input(folder / f"in{exponent}.parquet", 10**exponent)
            arguments = ["size", str(source), str(folder / f"out{exponent}"), urls[0]]
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "benchmarks.bulk", *arguments, cwd=ROOT, stdout=subprocess.PIPE
            )
            output, _ = await child.communicate()
            print(f"memory: 10^{exponent} rows: {float(output):.0f} MB at most")


BENCHMARKS = {"resume": resume, "cpu": cpu, "memory": memory, "killed": killed, "real": real}


def main():
    if sys.argv[1:2] == ["size"]:
        print(asyncio.run(one_size(*sys.argv[2:])))
        return
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bulk", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *BENCHMARKS], metavar="NAME")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    for name in options.names or BENCHMARKS:
        with tempfile.TemporaryDirectory() as directory:
            asyncio.run(BENCHMARKS[name](Path(directory), options.quick))


if __name__ == "__main__":
    main()
