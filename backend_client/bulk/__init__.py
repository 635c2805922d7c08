"""Data sets over a fleet: embed every row of many files, or answer every prompt, and lose or repeat none.

    from backend_client.bulk import BulkRequest, run_job

    report = await run_job(BulkRequest(kind="embed", source="s3://in/*.parquet", out="s3://out/", column="text"))

The input is cut into fragments; each becomes one file that is committed as a whole, and the first writer wins. Killed
anywhere, the same call continues. On the command line: `npu-client embed-dataset` and `generate-dataset`. Needs the
extra `bulk` (`pip install '.[bulk]'` in a checkout). See docs/cluster.md.
"""

# May import every package of the client but `cli`. Begin reading with `run.run_job`, then `worker` (one fragment),
# `job` (what the output depends on), `readers` (rows and fragments of the input) and `stores` (who wins).

from backend_client.bulk.job import BulkRequest
from backend_client.bulk.output import BulkReport, ExitCode, Progress
from backend_client.bulk.run import TooManyRejected, run_job, status
from backend_client.bulk.stores import OutputFailed

__all__ = ["BulkReport", "BulkRequest", "ExitCode", "OutputFailed", "Progress", "TooManyRejected", "run_job", "status"]
