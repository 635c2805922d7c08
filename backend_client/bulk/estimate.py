"""Estimates what a job takes, from its plan and a measured sample: for `--dry-run`. Writes nothing."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from backend_client.bulk.columns import with_columns
from backend_client.bulk.inputs import Fragment, check_apart, list_inputs, of_shard, plan
from backend_client.bulk.job import BulkJob, BulkRequest, Chunk
from backend_client.bulk.readers import read
from backend_client.bulk.worker import Worker
from backend_client.lifetime import in_daemon_thread
from backend_client.settings import ClientSettings

_SAMPLE = {"embed": 512, "generate": 8}
# Two to three minutes: what one death may cost.
_FRAGMENT_S = 150


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """`rows` is an estimate where metadata does not tell it. `cloud_cost`: the most it can cost, if all went there."""

    files: int
    input_bytes: int
    fragments: int
    rows: int
    rows_per_second: float
    seconds: float
    output_bytes: int
    cloud_cost: Decimal
    suggested_rows_per_fragment: int
    sampled_rows: int
    sample_rejected: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {name: getattr(self, name) for name in self.__slots__} | {"cloud_cost": str(self.cloud_cost)}


async def estimate(request: BulkRequest, settings: ClientSettings) -> Estimate:
    """List, plan, find the columns and serve a sample of the first fragment.

    Raises ConfigurationError for what a run would refuse, and NPUError.
    """
    check_apart(request.source, request.out)
    files = await in_daemon_thread(lambda: list_inputs(request.source), "list input")
    fragments = await in_daemon_thread(lambda: plan(files, request.rows), "plan")
    mine = of_shard(fragments, request.shard)
    # A measurement waits for no node, and is never billed.
    worker = Worker(replace(request, patience=0.0, allow_cloud=False), settings)
    try:
        probe = await worker.probe(None)
        job = request.job("", model=probe.model, space=probe.space, dimensions=probe.dimensions)
        job = await in_daemon_thread(lambda: with_columns(job, files), "find columns")
        await worker.begin(job)
        chunk = await in_daemon_thread(lambda: _first(fragments, job), "read sample")
        inputs = chunk.inputs[: _SAMPLE[request.kind]]
        _, _, work = worker.begun
        began = time.monotonic()
        results = await work.run(inputs)
        seconds = max(time.monotonic() - began, 1e-6)
    finally:
        await worker.close()
    served = len(inputs) - len(results.refused)
    rate = served / seconds
    rows = _rows(mine, chunk, len(inputs))
    value = 4 * job.dimensions if job.kind == "embed" else 4 * _mean(results.columns["num_generated_tokens"])
    return Estimate(
        files=len(files),
        input_bytes=sum(file.size for file in files),
        fragments=len(mine),
        rows=rows,
        rows_per_second=round(rate, 2),
        seconds=round(rows / rate, 1) if rate else 0.0,
        output_bytes=int(rows * value) + sum(file.size for file in files),
        cloud_cost=_cost(
            request, settings, job, results.tokens, sum(filter(None, results.columns["num_generated_tokens"])), served
        )
        * rows,
        suggested_rows_per_fragment=max(1, round(rate * _FRAGMENT_S)),
        sampled_rows=len(inputs),
        sample_rejected=len(inputs) - served + len(chunk.rejected),
    )


def _first(fragments: list[Fragment], job: BulkJob) -> Chunk:
    for fragment in fragments:
        for chunk in read(fragment, job):
            if chunk.inputs:
                return chunk
    return Chunk(None, [], [], [])


def _rows(fragments: list[Fragment], chunk: Chunk, sampled: int) -> int:
    """Known rows, and for files without a count as many as the mean length of the sample's texts makes likely."""
    known = sum(part.rows for part in fragments if part.rows is not None)
    unknown = sum(part.stop - part.start for part in fragments if part.rows is None)
    length = sum(len(str(value).encode(errors="replace")) for value in chunk.inputs[:sampled]) / max(1, sampled)
    return known + (round(unknown / (length + 32)) if unknown else 0)


def _mean(counts: list[int | None]) -> float:
    found = [count for count in counts if count is not None]
    return sum(found) / len(found) if found else 0.0


def _cost(
    request: BulkRequest, settings: ClientSettings, job: BulkJob, tokens: int, generated: int, rows: int
) -> Decimal:
    """Of one row in the cloud; 0 where the job never leaves the premises."""
    if not request.allow_cloud or settings.cloud is None or not rows:
        return Decimal(0)
    cloud = settings.cloud
    name = (
        cloud.embedding_models.get(job.space)
        if job.kind == "embed"
        else cloud.chat_models.get(job.model, cloud.chat_model)
    )
    price = cloud.prices.get(name or "")
    if price is None:
        return Decimal(0)
    return (price.input * tokens + price.output * generated) / rows / 1_000_000
