"""The NPUs first, then the cloud. Here, and nowhere else, NPUUnavailableError is caught."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from backend_client._cloud.ledger import Ledger
from backend_client._protocol.jobs import Answer, EmbedJob, EventStream, Exchange, GenerateJob, J, Job
from backend_client._protocol.report import ModelReport
from backend_client._resilience.deadline import Deadline
from backend_client._routing.fleet_backend import FleetBackend
from backend_client.errors import CloudError, CloudRejected, NPUUnavailableError
from backend_client.options import FallbackOptions
from backend_client.results import Attempt, EmbedBatch, GenerateResult, RawReply

if TYPE_CHECKING:
    from backend_client._cloud.backend import CloudBackend

log = logging.getLogger(__name__)
A = TypeVar("A", EmbedBatch, GenerateResult, RawReply)
R = TypeVar("R")


class FallbackBackend:
    """The fleet, and behind it the cloud for what the fleet cannot serve and the cloud may."""

    def __init__(
        self,
        fleet: FleetBackend,
        cloud: CloudBackend | None,
        ledger: Ledger,
        options: FallbackOptions,
        *,
        local_only: bool,
    ) -> None:
        self._fleet = fleet
        self._cloud = cloud
        self._ledger = ledger
        self._options = options
        self._local_only = local_only

    def concurrency(self) -> int:
        """As the fleet's."""
        return self._fleet.concurrency()

    async def close(self) -> None:
        """Close both."""
        await self._fleet.close()
        if self._cloud is not None:
            await self._cloud.close()

    async def embed(self, job: EmbedJob) -> EmbedBatch:
        """Embed on a node, else in the cloud if it has a model for the same vector space."""
        return await self._whole(job, self._fleet.embed, lambda cloud: cloud.embed)

    async def generate(self, job: GenerateJob) -> GenerateResult:
        """Answer on a node, else in the cloud."""
        return await self._whole(job, self._fleet.generate, lambda cloud: cloud.generate)

    async def open_stream(self, job: GenerateJob, opened_by: Deadline | None = None) -> Answer:
        """Open on a node, else in the cloud; whoever sends the first piece sends all."""
        before: tuple[Attempt, ...] = ()

        async def in_cloud(cloud: CloudBackend, spent: NPUUnavailableError) -> Answer:
            nonlocal before
            before = spent.attempts
            return await cloud.open_stream(self._for_cloud(job, cloud), opened_by)

        # Only the opening leaves time for the cloud: an answer that has begun may take all there is.
        answer = await self._first(job, self._fleet.open_stream, in_cloud)
        return self._counted(answer, before)

    async def _counted(self, answer: Answer, before: tuple[Attempt, ...]) -> Answer:
        try:
            async for item in answer:
                if isinstance(item, str):
                    yield item
                elif item.source == "npu":
                    self._ledger.kept_local(item.usage)
                    yield item
                else:
                    yield replace(item, attempts=before + item.attempts)
        finally:
            await answer.aclose()

    async def exchange(self, job: Exchange) -> RawReply:
        """A request in OpenAI's dialect on a node; a chat else in the cloud."""
        return await self._whole(job, self._fleet.exchange, lambda cloud: cloud.exchange)

    async def open_exchange(self, job: Exchange, opened_by: Deadline | None = None) -> EventStream:
        """The same as a stream; whichever sends the first part of the answer sends all."""
        before: tuple[Attempt, ...] = ()

        async def in_cloud(cloud: CloudBackend, spent: NPUUnavailableError) -> EventStream:
            nonlocal before
            before = spent.attempts
            return await cloud.open_exchange(self._for_cloud(job, cloud), opened_by)

        events = await self._first(job, self._fleet.open_exchange, in_cloud)
        return self._counted_events(events, before)

    async def models(self) -> list[ModelReport]:
        """As the fleet's."""
        return await self._fleet.models()

    async def _counted_events(self, events: EventStream, before: tuple[Attempt, ...]) -> EventStream:
        try:
            async for item in events:
                if isinstance(item, RawReply) and item.source == "npu":
                    self._ledger.kept_local(item.usage)
                yield replace(item, attempts=before + item.attempts) if isinstance(item, RawReply) else item
        finally:
            await events.aclose()

    async def _whole(
        self,
        job: J,
        on_fleet: Callable[[J], Awaitable[A]],
        method: Callable[[CloudBackend], Callable[[J], Awaitable[A]]],
    ) -> A:
        async def in_cloud(cloud: CloudBackend, spent: NPUUnavailableError) -> A:
            answer = await method(cloud)(self._for_cloud(job, cloud))
            return replace(answer, attempts=spent.attempts + answer.attempts)

        answer = await self._first(job, lambda job, until: on_fleet(job.within(until)), in_cloud)
        if answer.source == "npu":
            self._ledger.kept_local(answer.usage)
        return answer

    async def _first(
        self,
        job: J,
        on_fleet: Callable[[J, Deadline], Awaitable[R]],
        in_cloud: Callable[[CloudBackend, NPUUnavailableError], Awaitable[R]],
    ) -> R:
        """The fleet's answer by a part of the deadline, else the cloud's by the whole of it.

        Raises the fleet's error, which then says why the cloud did not help, or CloudRejected.
        """
        cloud = None if self._forbidden(job) else self._cloud
        try:
            if cloud is None or not _cloud_may(job):
                return await on_fleet(job, job.deadline)
            shared = replace(job, cloud_takes_over=lambda: self._refusal(job, cloud) is None)
            return await on_fleet(shared, self._until(job.deadline))
        except NPUUnavailableError as error:
            unavailable = error
        if cloud is None:
            raise unavailable.without_cloud(f"the cloud was not asked: {self._forbidden(job)}")
        refusal = self._refusal(job, cloud)
        if refusal is not None:
            raise unavailable.without_cloud(f"the cloud was not asked: {refusal}")
        log.info("%s goes to the cloud: %s", job.request_id, unavailable.message)
        try:
            return await in_cloud(cloud, unavailable)
        except CloudRejected as error:
            error.attempts = unavailable.attempts + error.attempts
            raise
        except CloudError as error:
            failed = error
        unavailable.attempts += failed.attempts
        raise unavailable.without_cloud(failed.message, failed)

    def _forbidden(self, job: Job) -> str | None:
        """Why no cloud at all may serve the job, or None."""
        if self._cloud is None:
            return "none is configured"
        if job.local_only or self._local_only:
            return "local_only is set"
        if job.require_device is not None:
            return f"the call requires the device {job.require_device}"
        return None

    def _refusal(self, job: Job, cloud: CloudBackend) -> str | None:
        """Why the cloud cannot serve the job as it was requested, or None."""
        wanted = self._for_cloud(job, cloud)
        if isinstance(wanted, EmbedJob) and wanted.space is None:
            return "no node has reported the vector space yet; bind it with spaces.<model>"
        if wanted.model is None and (isinstance(wanted, GenerateJob) or _is_chat(wanted)):
            if job.model is None:
                return "cloud.chat_model is not set"
            return f"no cloud model is declared for {job.model} (cloud.chat_models)"
        return cloud.refusal(wanted)

    def _for_cloud(self, job: J, cloud: CloudBackend) -> J:
        """The job as the cloud gets it: the fleet's model names mean nothing there."""
        if isinstance(job, EmbedJob):
            known = self._fleet.runtime.bindings.known(job.model)
            if job.dimensions is not None and known.space is not None and job.dimensions != known.dimensions:
                # As the node names it. No cloud model is declared for it unless the settings say so.
                known = known._replace(space=f"{known.space}-{job.dimensions}", dimensions=job.dimensions)
            return replace(job, model=None, **known._asdict())
        if isinstance(job, GenerateJob) or _is_chat(job):
            return replace(job, model=cloud.chat_model_for(job.model))
        return job

    def _until(self, deadline: Deadline) -> Deadline:
        return deadline.earlier(min(self._options.longest, deadline.remaining() * self._options.share))


def _cloud_may(job: Job) -> bool:
    """Whether time must be left for the cloud: of OpenAI's other requests it serves none."""
    return not isinstance(job, Exchange) or _is_chat(job)


def _is_chat(job: Job) -> bool:
    return isinstance(job, Exchange) and job.path == "/v1/chat/completions"
