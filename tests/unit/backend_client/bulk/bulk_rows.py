"""The rows of input files as the readers of data sets give them."""

from dataclasses import replace

from backend_client.bulk.job import BulkJob
from backend_client.bulk.readers import read

JOB = BulkJob(kind="embed", source="", listing="", column="text", id_column="id", rows_per_fragment=10, model="m")
JOB = replace(JOB, json_types={"id": "str", "text": "str"})


def rows_in(fragments, job=JOB):
    """(place, input) of all rows, and all rejections."""
    found, rejected = [], []
    for fragment in fragments:
        for chunk in read(fragment, job):
            found += zip(chunk.rows, chunk.inputs, strict=True)
            rejected += chunk.rejected
            assert chunk.table is None or chunk.table.num_rows == len(chunk.rows)
    return found, rejected
