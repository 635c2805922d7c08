"""One fragment from its rows to its file: nothing is lost between its chunks."""

import asyncio
import json
import subprocess
import sys
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from backend_client.bulk.answers import Results
from backend_client.bulk.job import BulkJob
from backend_client.bulk.readers import CHUNK_ROWS
from backend_client.bulk.stores import open_store
from backend_client.bulk.worker import process, uninterrupted
from tests.unit.backend_client.bulk.bulk_rows import surveyed

VECTORS = BulkJob(kind="embed", source="", column="", rows_per_fragment=1, model="", dimensions=1)


class Counting:
    """Work that gives each row a vector of its number in it; at most `rows_ahead` rows should be under way."""

    rows_ahead = 1

    def __init__(self):
        self.sizes = []
        self.running = self.most = 0

    async def run(self, chunk):
        inputs = chunk.inputs
        self.sizes.append(len(inputs))
        self.running += len(inputs)
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.02)  # long enough for a reader without a bound to run ahead
        self.running -= len(inputs)
        results = Results(len(inputs), VECTORS)
        results.values[:, 0] = [float(text) for text in inputs]
        return results


def prepared(tmp_path, rows, form="parquet"):
    path = tmp_path / f"in.{form}"
    if form == "parquet":
        pq.write_table(pa.table({"text": [str(row) for row in range(rows)]}), path)
    else:
        path.write_text("".join(json.dumps({"text": str(row)}) + "\n" for row in range(rows)))
    job, (fragment,) = surveyed(path, 10**6, dimensions=1)
    return fragment, job, open_store(str(tmp_path / "out"))


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
@pytest.mark.parametrize("rows", [0, 1, CHUNK_ROWS - 1, CHUNK_ROWS, CHUNK_ROWS + 1, 2 * CHUNK_ROWS, 5 * CHUNK_ROWS + 7])
async def test_every_row_has_its_result_however_many_chunks_there_are(tmp_path, form, rows):
    fragment, job, store = prepared(tmp_path, rows, form)
    work = Counting()
    receipt = await process(fragment, job, store, work)
    table = pq.read_table(tmp_path / "out" / fragment.name)
    assert receipt.rows == table.num_rows == rows
    if rows:
        assert table.column("text").to_pylist() == [str(row) for row in range(rows)]
    assert table.column("embeddings").to_pylist() == [[float(row)] for row in range(rows)]
    assert sum(work.sizes) == rows
    assert work.most <= 2 * CHUNK_ROWS


async def test_a_reader_is_ahead_by_the_rows_that_the_nodes_need_and_not_by_as_many_chunks(tmp_path):
    fragment, job, store = prepared(tmp_path, 8 * CHUNK_ROWS)
    work = Counting()
    work.rows_ahead = 2 * CHUNK_ROWS
    await process(fragment, job, store, work)
    assert 2 * CHUNK_ROWS <= work.most <= 3 * CHUNK_ROWS


async def test_a_committed_fragment_is_not_served_again(tmp_path):
    fragment, job, store = prepared(tmp_path, 10)
    first = await process(fragment, job, store, Counting())
    work = Counting()
    assert await process(fragment, job, store, work) == replace(first, won=False)
    assert work.sizes == []


async def test_the_account_of_two_writers_is_that_of_the_first(tmp_path):
    fragment, job, store = prepared(tmp_path, 10)

    class Second(Counting):
        async def run(self, chunk):
            await process(fragment, job, store, Counting())
            results = await super().run(chunk)
            results.refused[3] = "refused"
            return results

    receipt = await process(fragment, job, store, Second())
    assert (receipt.won, receipt.rows, receipt.rejected) == (False, 10, 0)


async def test_readers_find_a_flipped_byte_in_an_output(tmp_path):
    fragment, job, store = prepared(tmp_path, 3000)
    await process(fragment, job, store, Counting())
    path = tmp_path / "out" / fragment.name
    data = bytearray(path.read_bytes())
    data[2000] ^= 1
    path.write_bytes(data)
    with pytest.raises(OSError, match="CRC"):
        pq.read_table(path, page_checksum_verification=True)


async def test_a_fragment_that_is_cancelled_leaves_no_temporary_file(tmp_path):
    fragment, job, store = prepared(tmp_path, 10)

    class Stuck(Counting):
        async def run(self, inputs):
            begun.set()
            await asyncio.Event().wait()

    begun = asyncio.Event()
    task = asyncio.create_task(process(fragment, job, store, Stuck()))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]


async def test_who_is_cancelled_goes_when_the_work_has_ended(caplog):
    begun, allowed = asyncio.Event(), asyncio.Event()

    async def work():
        begun.set()
        await allowed.wait()
        raise OSError(28, "No space left on device")

    caller = asyncio.create_task(uninterrupted(work()))
    await begun.wait()
    for _ in range(3):
        caller.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not caller.done()
    allowed.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert not caplog.records


INTERRUPTED = """
import threading
from backend_client.lifetime import map_in_daemon_threads
begun = threading.Event()
def read(item):
    begun.set()
    threading.Event().wait()
threading.Thread(target=map_in_daemon_threads, args=(read, [1, 2], 1, "files"), daemon=True).start()
begun.wait()
"""


def test_a_process_ends_while_files_are_being_read():
    assert subprocess.run([sys.executable, "-c", INTERRUPTED], timeout=60, check=False).returncode == 0
