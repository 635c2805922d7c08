"""A job as its output describes it: opened or created, planned, and split into what is done and what is left."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from backend_client.bulk import plan as plans
from backend_client.bulk.columns import with_columns
from backend_client.bulk.driver import Progress
from backend_client.bulk.executors import Executor
from backend_client.bulk.finish import SUCCESS, finish
from backend_client.bulk.fragments import Fragment, listing_digest, of_shard
from backend_client.bulk.inputs import check_apart, list_inputs
from backend_client.bulk.job import BulkJob
from backend_client.bulk.receipts import Receipt, read_receipts
from backend_client.bulk.request import BulkRequest
from backend_client.bulk.steps import reached
from backend_client.bulk.stores import Store
from backend_client.errors import ConfigurationError
from backend_client.lifetime import in_daemon_thread

_JOB, _PLAN = "job.json", "_plan.json"


@dataclass(slots=True)
class OpenedJob:
    """A job of an output: all `fragments`, those of this shard (`mine`), and of these the ones without a file (`todo`).

    `receipts` are those of earlier runs, by fragment.
    """

    job: BulkJob
    store: Store
    fragments: list[Fragment]
    mine: list[Fragment]
    todo: list[Fragment]
    receipts: dict[str, Receipt] = field(default_factory=dict)

    def progress(self) -> Progress:
        """Read the receipts of the fragments that have a file, and return the sums over them."""
        progress = Progress(len(self.mine))
        todo = {fragment.id for fragment in self.todo}
        done = [fragment for fragment in self.mine if fragment.id not in todo]
        self.receipts = read_receipts(self.store, done)
        for receipt in self.receipts.values():
            progress.add(receipt, before=True)
        # A writer may have died before its receipt: the fragment is done all the same.
        progress.done = len(done)
        return progress

    def finish_if_complete(self) -> bool:
        """Write `_SUCCESS` if every fragment of the job has a file; return whether the job is complete."""
        present = self.store.names()
        if SUCCESS in present:
            return True
        if any(fragment.name not in present for fragment in self.fragments):
            return False
        finish(self.store, self.fragments, self.receipts)
        return True


def was_completed(store: Store) -> bool:
    """Whether an earlier run has completed the job of this output."""
    return all(store.has(name) for name in (SUCCESS, _JOB, _PLAN))


async def describe(request: BulkRequest, store: Store, worker: Executor) -> BulkJob:
    """Return the job of the output, which is created for the request if there is none.

    Raises ConfigurationError when the output holds another job than the request asks for.
    """
    check_apart(request.source, request.out)
    files = await in_daemon_thread(lambda: list_inputs(request.source), "list input")
    listing = listing_digest(files)
    data = await in_daemon_thread(lambda: store.read(_JOB), "read job")
    if data is None:
        probe = await worker.probe(None)
        job = request.job(listing, model=probe.model, space=probe.space, dimensions=probe.dimensions)
        job = await in_daemon_thread(lambda: with_columns(job, files), "find columns")
        await in_daemon_thread(lambda: store.create(_JOB, job.dump()), "describe job")
        # Of two drivers that start at once, both take the description that was written first.
        data = await in_daemon_thread(lambda: store.read(_JOB), "read job")
    stored = BulkJob.load(data or b"", f"{request.out}/{_JOB}")
    model = request.model or stored.model
    wanted = request.job(listing, model=model, space=stored.space, dimensions=stored.dimensions)
    # Columns are determined only once: the equal listing shows that the files are the same.
    if differences := stored.differences(replace(wanted, schema=stored.schema, json_types=stored.json_types)):
        lines = "\n  ".join(differences)
        raise ConfigurationError(
            f"{request.out} holds another job:\n  {lines}\nrun it with what job.json says, or choose another output"
        )
    reached("job described")
    return stored


def open_job(request: BulkRequest, job: BulkJob, store: Store) -> OpenedJob:
    """Plan the fragments of the job unless its output has a plan. Raises ConfigurationError if the input changed."""
    data = store.read(_PLAN)
    if data is None:
        files = list_inputs(request.source)
        if listing_digest(files) != job.listing:
            raise ConfigurationError("the input changed while the job was planned: run it again")
        store.create(_PLAN, plans.dump(plans.plan(files, job.rows_per_fragment)))
        data = store.read(_PLAN) or b""
    reached("plan stored")
    return _split(request, job, store, plans.load(data))


def read_job(request: BulkRequest, store: Store) -> OpenedJob:
    """Return the job of an output without changing it. Raises ConfigurationError if the output has no job."""
    data = store.read(_JOB)
    stored = store.read(_PLAN)
    if data is None or stored is None:
        raise ConfigurationError(f"{request.out} holds no job")
    return _split(request, BulkJob.load(data, f"{request.out}/{_JOB}"), store, plans.load(stored))


def _split(request: BulkRequest, job: BulkJob, store: Store, fragments: list[Fragment]) -> OpenedJob:
    mine = of_shard(fragments, request.shard)
    present = store.names()
    return OpenedJob(job, store, fragments, mine, [part for part in mine if part.name not in present])
