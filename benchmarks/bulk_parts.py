"""What the benchmarks of data sets share: made-up nodes, inputs, and an output that is already complete."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from backend_client.bulk import BulkRequest, run_job
from backend_client.bulk.inputs import Fragment, InputFile, list_inputs
from backend_client.bulk.output import Writer
from backend_client.bulk.readers import survey
from backend_client.bulk.stores import open_store
from backend_client.settings import ClientSettings

ROOT = Path(__file__).parents[1]
WORDS = "node text vector answer model device queue batch token cloud engine fragment".split()


@contextlib.contextmanager
def made_up_nodes(count, rate=0.0):
    """The processes of so many nodes, and their URLs."""
    command = [sys.executable, "-m", "benchmarks.bulk_node", "--rate", str(rate)]
    env = os.environ | {"PYTHONPATH": f"{ROOT}"}
    nodes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) for _ in range(count)]
    try:
        yield nodes, [node.stdout.readline().strip() for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
            node.stdout.close()


def make_texts(rows, words=24):
    return [" ".join([str(row), *(WORDS[(row + word) % len(WORDS)] for word in range(words))]) for row in range(rows)]


def make_input(path, rows, row_group=10_000, words=24):
    """A Parquet file with texts of about 150 bytes."""
    schema = pa.schema([("id", pa.int64()), ("text", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, rows, row_group):
            part = range(start, min(rows, start + row_group))
            texts = [" ".join([str(row), *(WORDS[(row + word) % len(WORDS)] for word in range(words))]) for row in part]
            writer.write_table(pa.table({"id": list(part), "text": texts}, schema=schema))
    return path


def request_for(source, out, **more):
    values = {"kind": "embed", "column": "text", "rows_per_fragment": 10_000} | more
    return BulkRequest(source=str(source), out=str(out), **values)


async def timed(source, out, urls, **more):
    """The report of a job on these nodes."""
    return await run_job(request_for(source, out, **more), ClientSettings.load(nodes=urls))


def complete_output(source, out, fragments):
    """An output in which all of so many fragments have a file, but for `_SUCCESS`."""
    files = list_inputs(str(source))
    request = request_for(source, out, rows_per_fragment=1)
    job, _ = survey(request.job(model="made-up", space="made-up", dimensions=384), files)
    parts = empty_fragments(files[0], fragments)
    store = open_store(str(out))
    store.create("_job.json", job.dump(parts))
    for part in parts:
        Writer(store.temporary(part.id), part, job).commit(store)
    return request


def empty_fragments(file: InputFile, count):
    """Fragments without rows: what handing them out costs, and nothing else."""
    return [Fragment(file, number, number, 0) for number in range(count)]
