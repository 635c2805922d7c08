"""The rows of input files as the readers of data sets give them."""

from backend_client.bulk.inputs import list_inputs
from backend_client.bulk.job import BulkJob
from backend_client.bulk.readers import read, survey


def surveyed(path, wanted=1000, **more):
    """The job over these files, and its fragments of so many rows."""
    job = BulkJob(kind="embed", source=str(path), column="text", rows_per_fragment=wanted, model="m", **more)
    return survey(job, list_inputs(str(path)))


def rows_in(path, wanted=1000, **more):
    """(place, input) of all rows, and all rejections."""
    found, rejected = [], []
    job, fragments = surveyed(path, wanted, **more)
    for fragment in fragments:
        for chunk in read(fragment, job):
            found += zip(chunk.rows, chunk.inputs, strict=True)
            rejected += chunk.rejected
            assert chunk.table is None or chunk.table.num_rows == len(chunk.rows)
    return found, rejected
