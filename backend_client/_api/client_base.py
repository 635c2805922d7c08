"""What all methods of a client share: the backend, the defaults of a view, the deadline, and closing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NoReturn, Self, Unpack

from backend_client._api import arguments
from backend_client._protocol import wire
from backend_client._protocol.images import writing_kind
from backend_client._protocol.jobs import Backend, Exchange, split_options
from backend_client._protocol.report import ModelKind
from backend_client._resilience.closing import OpenCalls
from backend_client._resilience.deadline import Clock, Deadline
from backend_client.options import ClientOptions
from backend_client.results import CallOptions, RawReply


@dataclass(slots=True)
class Core:
    """What a client and all its views share."""

    backend: Backend
    options: ClientOptions
    clock: Clock
    calls: OpenCalls = field(default_factory=OpenCalls)
    """What waits for something else than the backend: the source of a stream of texts."""


def not_picklable(client: object) -> TypeError:
    """The error for pickling a client: why it cannot be sent to another process, and what to do instead."""
    return TypeError(
        f"{type(client).__name__} cannot be pickled: it holds connections; build one in each process, "
        "for example with from_settings()"
    )


class ClientBase:
    """Use as `async with`, or `close()` it."""

    def __init__(self, backend: Backend, options: ClientOptions, clock: Clock = time.monotonic) -> None:
        self._core = Core(backend, options, clock)
        self._defaults: Mapping[str, Any] = {}

    @property
    def core(self) -> Core:
        """What this client shares with its views: for other modules of this package."""
        return self._core

    def with_options(self, **options: Unpack[CallOptions]) -> Self:
        """A view on this client whose calls have these options unless they are given others.

        It costs nothing: nodes, connections and budgets are the same, and closing it closes the client.
        """
        given = arguments.options("with_options", options, CallOptions)
        view = self.__copy__()
        vars(view)["_defaults"] = {**self._defaults, **given}
        return view

    def __copy__(self) -> Self:
        view = object.__new__(type(self))
        vars(view).update(vars(self))
        return view

    def __reduce__(self) -> NoReturn:
        raise not_picklable(self)

    def wrap_backend(self, wrap: Callable[[Backend], Backend]) -> None:
        """Wrap the backend; see `backend_client.observability`."""
        self._core.backend = wrap(self._core.backend)

    async def close(self) -> None:
        """Release connections and tasks. Calls that are under way end at once with ClientClosed."""
        await self._core.calls.close()
        await self._core.backend.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _given(self, method: str, options: Mapping[str, Any], declared: type) -> dict[str, Any]:
        """The options of a call, checked, with the defaults of this view. Raises InvalidArgument."""
        given = arguments.options(method, options, declared)
        return {**self._defaults, **given} if self._defaults else given

    def _deadline(self, given: Mapping[str, Any], default: float) -> Deadline:
        return Deadline.after(given.get("timeout", default), self._core.clock)

    async def _exchange(
        self,
        path: str,
        body: Mapping[str, Any],
        given: Mapping[str, Any],
        timeout: float,
        *,
        kind: ModelKind | None = None,
    ) -> RawReply:
        common, _ = split_options(given)
        kind = kind or writing_kind(body)
        job = Exchange(path=path, kind=kind, deadline=self._deadline(given, timeout), body=body, **common)
        wire.encode(body)
        return await self._core.backend.exchange(job)
