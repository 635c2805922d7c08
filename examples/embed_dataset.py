"""Embed a directory of Parquet files, in this process or in shards: python examples/embed_dataset.py IN OUT [I/N].

Killed anywhere, the same command continues; no row is lost or there twice. On a Ray cluster whose machines run a
node and offer `intel_npu` (ray start --resources '{"intel_npu": 1}'), the command line does the same:

    npu-client embed-dataset IN OUT --text-column text --ray ADDRESS
"""

import asyncio
import sys

from backend_client.bulk import BulkRequest, run_job


async def main(source: str, out: str, shard: str = "0/1") -> int:
    index, count = map(int, shard.split("/"))
    report = await run_job(BulkRequest(kind="embed", source=source, out=out, column="text", shard=(index, count)))
    print(f"{report.rows} rows in {report.done} of {report.fragments} fragments, {report.rejected} rejected")
    return report.exit_code


if __name__ == "__main__":
    sys.exit(asyncio.run(main(*sys.argv[1:])))
