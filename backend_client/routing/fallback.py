"""The NPUs first, then the cloud: what no node can serve goes there, where the settings and the call allow it."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from backend_client.calls import Backend
from backend_client.cloud import Ledger
from backend_client.errors import CloudError, CloudRejected, ContextLengthExceeded, NPUError, NPUUnavailableError
from backend_client.http.messages import Request, plain_name
from backend_client.http.replies import Forwarded, asks_for_stream
from backend_client.http.routes import ROUTES, only_on_nodes, texts_to_embed
from backend_client.http.stream_forms import EventStream
from backend_client.lifetime import STARTED, owning
from backend_client.options import FallbackOptions
from backend_client.results import Attempt, EmbedBatch, RawReply
from backend_client.routing.backend import FleetBackend

if TYPE_CHECKING:
    from backend_client.cloud.backend import CloudBackend


log = logging.getLogger(__name__)
A = TypeVar("A", EmbedBatch, RawReply)
R = TypeVar("R")
Attempts = tuple[Attempt, ...]
Ask: TypeAlias = Callable[[Backend, Request], Awaitable[R]]
"""One of the methods of a backend."""


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
        self._bindings = fleet.runtime.bindings
        if cloud is not None and not local_only:
            _warn_of_embeddings(cloud.spaces, self._bindings.spaces.values())

    async def close(self) -> None:
        await self._fleet.close()
        if self._cloud is not None:
            await self._cloud.close()

    async def embed(self, request: Request) -> EmbedBatch:
        """Embed on a node, else in the cloud if it has a model for the same vector space."""
        return self._counted(*await self._first(request, lambda backend, wanted: backend.embed(wanted)))

    async def send(self, request: Request) -> RawReply:
        return self._counted(*await self._first(request, lambda backend, wanted: backend.send(wanted)))

    def _counted(self, answer: A, before: Attempts) -> A:
        if answer.source == "node":
            self._ledger.kept_local(answer.usage, answer.joules)
        return replace(answer, attempts=before + answer.attempts) if before else answer

    async def open(self, request: Request) -> EventStream:
        """The same as a stream; whichever sends the first part of the answer sends all."""
        events, before = await self._first(request, lambda backend, wanted: backend.open(wanted))
        return self._counting(events, before)

    async def forward(self, request: Request) -> Forwarded:
        """The reply to a request that came as bytes. A cloud's is in OpenAI's form."""
        found, before = await self._first(request, lambda backend, wanted: backend.forward(wanted))
        found.attempts[:0] = before
        if request.failover.stream_recovery and asks_for_stream(request) and not isinstance(found.content, bytes):
            # The cloud's, which nobody can take over; its caller gets all of it, or a clean error.
            return replace(found, content=b"".join([part async for part in found.content]))
        if found.origin.source == "node":
            if not isinstance(found.content, bytes):
                return replace(found, content=self._counting(found.content, (), found))
            self._ledger.kept_local(found.count.usage, found.count.joules)
        return found

    @owning
    async def _counting(
        self, items: AsyncGenerator[Any, None], before: Attempts, found: Forwarded | None = None
    ) -> AsyncGenerator[Any, None]:
        """The items of a stream, of events or the bytes that were `found`, which is counted at its end."""
        try:
            yield STARTED
            async for item in items:
                yield self._counted(item, before) if isinstance(item, RawReply) else item
            if found is not None:
                self._ledger.kept_local(found.count.usage, found.count.joules)
        finally:
            await items.aclose()

    async def _first(self, request: Request, ask: Ask[R]) -> tuple[R, Attempts]:
        """As `_by_model`; a prompt that is too long for its model goes to the larger one, if there is one."""
        try:
            return await self._by_model(request, ask)
        except ContextLengthExceeded as error:
            larger, before = self._larger_model(request), error.attempts
            if larger is None:
                raise
        log.info("%s is too long for its model and goes to %s", request.request_id, larger)
        try:
            # Its bytes name the first model.
            answer, after = await self._by_model(replace(request, model=larger, content=None), ask)
        except NPUError as error:
            error.attempts = before + error.attempts
            raise
        return answer, before + after

    def _larger_model(self, request: Request) -> str | None:
        """The model for a text that is too long for its own. Never for vectors: they would be of another space."""
        larger = request.failover.on_context_length
        if larger is None or ROUTES[request.path].form is None or ROUTES[request.path].upload:
            return None
        asked = request.model or self._bindings.default_model(request.kind) or ""
        return None if plain_name(larger) == plain_name(asked) else larger

    async def _by_model(self, request: Request, ask: Ask[R]) -> tuple[R, Attempts]:
        """The fleet's answer by a part of the deadline, else the cloud's by the whole; and the attempts before it.

        Raises the fleet's error, which then says why the cloud did not help, or CloudRejected.
        """
        cloud, deadline = self._cloud, request.deadline
        try:
            if cloud is None or self._must_stay(request):
                return await ask(self._fleet, request), ()
            # What is left for the cloud, or what may begin an answer: one that has begun may take all there is.
            until = deadline.earlier(min(self._options.longest, deadline.remaining() * self._options.share))
            takes_over: Callable[[], Any] = lambda: not isinstance(self._for_cloud(request, cloud), str)  # noqa: E731
            return await ask(self._fleet, replace(request, deadline=until, cloud_takes_over=takes_over)), ()
        except NPUUnavailableError as error:
            unavailable = error
        wanted = "none is configured" if cloud is None else self._for_cloud(request, cloud)
        if cloud is None or isinstance(wanted, str):
            raise unavailable.without_cloud(f"the cloud was not asked: {wanted}")
        log.info("%s goes to the cloud: %s", request.request_id, unavailable.message)
        try:
            answer = await ask(cloud, wanted)
        except CloudRejected as error:
            error.attempts = unavailable.attempts + error.attempts
            raise
        except CloudError as error:
            failed = error
        else:
            if texts_to_embed(request) is not None and wanted.space.name is not None:
                # Here, so that no way to the cloud can do without: the caller compares the vectors of all its calls.
                space = wanted.space.name.removesuffix(f"-{request.body.get('dimensions')}")
                self._bindings.bind(request.model, space)
            return answer, unavailable.attempts
        unavailable.attempts += failed.attempts
        raise unavailable.without_cloud(failed.message, failed)

    def _for_cloud(self, request: Request, cloud: CloudBackend) -> Request | str:
        """The request as the cloud gets it, where the fleet's model names mean nothing; or why it cannot serve it.

        This decides whether the cloud may be asked; the spend cap decides last (`cloud.Ledger`).
        """
        if reason := self._must_stay(request):
            return reason
        if texts_to_embed(request) is None:
            model = cloud.chat_model_for(request.model)
            if model is None and request.model:
                return f"no cloud model is declared for {request.model} (cloud.chat_models)"
            wanted = replace(request, model=model)
            return "cloud.chat_model is not set" if model is None else cloud.refusal(wanted) or wanted
        known, asked = self._bindings.known(request.model), request.body.get("dimensions")
        if known.name is None and self._bindings.unknown and len(cloud.spaces) == 1:
            # No node has been seen since the start, and only one space can be meant.
            known = known._replace(name=next(iter(cloud.spaces)))
        if known.name is None:
            return "no node has reported the vector space yet; bind it with spaces.<model>"
        if asked is not None and asked != known.dimensions:
            # As the node names it. No cloud model is declared for it unless the settings say so.
            known = known._replace(name=f"{known.name}-{asked}", dimensions=asked)
        wanted = replace(request, model=None, space=known)
        return cloud.refusal(wanted) or wanted

    def _must_stay(self, request: Request) -> str | None:
        """Why the request is for nodes alone, whatever the cloud has; then no time need be left for the cloud."""
        return "local_only is set" if self._local_only else only_on_nodes(request)


def _warn_of_embeddings(spaces: Collection[str], bound: Collection[str]) -> None:
    """Say at the start what embeddings cannot do later, when no node has been seen."""
    if not spaces:
        log.warning(
            "embeddings do not fall back to the cloud: map the vector space of your model (npu-client health --json "
            "shows it) in cloud.embedding_models to a cloud model that makes the same vectors"
        )
    elif len(spaces) > 1 and not set(spaces).intersection(bound):
        log.warning(
            "embeddings do not fall back to the cloud until a node has reported its vector space: "
            "cloud.embedding_models maps %d spaces; bind your model to one of them with spaces.<model>",
            len(spaces),
        )
