"""The clients: `NPUClient` on a fleet of nodes, `InferenceClient` with a cloud behind them."""

from __future__ import annotations

import random
import ssl
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import SecretStr

from backend_client.calls import BaseClient
from backend_client.cloud import Ledger
from backend_client.errors import ConfigurationError
from backend_client.fleet.node import BreakerState, Node
from backend_client.fleet.pool import Pool
from backend_client.fleet.runtime import Runtime
from backend_client.fleet.spaces import Bindings
from backend_client.http.addresses import Identity, keys_by_node, node_url, parse_nodes, proxy_url, tls_context
from backend_client.http.messages import DeviceReport, ModelReport
from backend_client.http.transport import HttpTransport
from backend_client.lifetime import Clock
from backend_client.options import ClientOptions
from backend_client.routing.backend import FleetBackend
from backend_client.routing.fallback import FallbackBackend
from backend_client.settings import ClientSettings, checked_key

if TYPE_CHECKING:
    from backend_client.cloud.backend import CloudClient


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One node as this client sees it.

    `status` is the node's own word, or "unknown" before its first probe, "unreachable" when that failed; `usable` says
    whether requests go there; `trouble` why not. `in_flight` counts this client's requests. `ejected`: its models that
    get no requests for a while, and why. `faults` are the faults on demand that the node was started with.
    """

    url: str
    status: str
    usable: bool
    breaker: BreakerState
    trouble: str | None
    in_flight: int
    version: str | None
    models: tuple[ModelReport, ...]
    devices: tuple[DeviceReport, ...]
    ejected: Mapping[str, str] = field(default_factory=dict)
    faults: tuple[str, ...] = ()

    @classmethod
    def of(cls, node: Node) -> NodeStatus:
        """The node's status now."""
        report = node.report
        answers = node.availability.closed or not node.probe_failures
        silent = "unreachable" if node.probed else "unknown"
        return cls(
            url=node.url,
            status=report.status if report is not None and answers else silent,
            usable=report is not None and report.serving and node.availability.admits() and answers,
            breaker=node.availability.state,
            trouble=node.availability.reason,
            in_flight=node.outstanding.total(),
            version=report.version if report else None,
            models=report.models if report else (),
            devices=report.devices if report else (),
            ejected={
                model: str(available.reason) for model, available in node.of_models.items() if not available.admits()
            },
            faults=report.faults if report else (),
        )


@dataclass(frozen=True, slots=True)
class ClientStatus:
    """For the caller's own health endpoint.

    `serving`: whether a call would find somebody now; `cloud`: "available" or "unavailable", None without a cloud;
    `cloud_trouble`: why it is unavailable; `retries_left`: what the retry budget holds; `cloud_cost`: what was spent.
    """

    serving: bool
    nodes_usable: int
    nodes: dict[str, str]
    retries_left: int
    cloud: Literal["available", "unavailable"] | None = None
    cloud_trouble: str | None = None
    cloud_cost: str | None = None

    def as_dict(self) -> dict[str, object]:
        """Ready for JSON."""
        return asdict(self)


class NPUClient(BaseClient):
    """Calls the node that can serve it soonest, and another one when that fails, within one deadline.

    `nodes` are URLs, or where to find them (`dns://`, `srv://`, `file://`; see docs/python-client.md). It may be made
    anywhere, and belongs to the event loop of its first call. `spaces` binds models to vector spaces in advance; else a
    model is bound to the space of its first answer, and vectors of another space are never returned.

    `node_keys` are API keys of single nodes by URL. `ca_file` replaces the system's authorities for nodes with https;
    `client_cert` and `client_key` are the client's own certificate; or give an `ssl_context`. Nodes are reached by a
    `proxy` only where it is given here. `registering`: there may be no `nodes`, because some are registered later.
    `transport` makes what carries the requests (tests). Raises ConfigurationError.
    """

    def __init__(
        self,
        nodes: Sequence[str],
        *,
        api_key: SecretStr | str | None = None,
        spaces: Mapping[str, str] | None = None,
        options: ClientOptions | None = None,
        node_keys: Mapping[str, str] | None = None,
        ca_file: Path | str | None = None,
        client_cert: Path | str | None = None,
        client_key: Path | str | None = None,
        ssl_context: ssl.SSLContext | None = None,
        proxy: str | None = None,
        registering: bool = False,
        transport: Callable[[], HttpTransport] | None = None,
        clock: Clock = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        options = ClientOptions() if options is None else options
        spaces = {} if spaces is None else spaces
        if isinstance(nodes, Iterable) and not isinstance(nodes, str):
            nodes = list(nodes)
        _check(nodes, api_key, spaces, options, registering=registering)
        try:
            key = checked_key(SecretStr(api_key) if isinstance(api_key, str) else api_key)
            urls, lists = parse_nodes(nodes)
        except ValueError as error:
            # Not as the cause: that would repeat a URL's password.
            raise ConfigurationError(str(error)) from None
        keys = keys_by_node(node_keys)
        if not lists and (strange := keys.keys() - {*urls}):
            raise ConfigurationError(f"node_keys must name nodes of the client, and has {', '.join(sorted(strange))}")
        rng = rng or random.Random()
        identity = Identity(
            key=key.get_secret_value() if key else "",
            node_keys=keys,
            tls=tls_context(ssl_context, ca_file, client_cert, client_key),
            proxy=proxy_url(proxy),
        )
        self._listed = frozenset(urls)
        self._registered: frozenset[str] = frozenset()
        self._node_keys = keys
        self._pool = Pool(options, clock, rng)
        self._pool.add(urls)
        runtime = Runtime(
            self._pool,
            Bindings(self._pool, spaces),
            transport or (lambda: HttpTransport(identity, options)),
            options,
            rng,
            lists,
        )
        self.fleet = FleetBackend(runtime, options, rng)
        super().__init__(self.fleet, self.fleet, options, clock)

    @classmethod
    def from_settings(
        cls, settings: ClientSettings | None = None, *, registering: bool = False, **options: Any
    ) -> Self:
        """The client that the settings describe (read from file and environment when not given).

        `options` are settings that go before those. Raises ConfigurationError.
        """
        settings = ClientSettings.with_values(settings, options)
        return cls(
            settings.nodes,
            api_key=settings.api_key,
            spaces=settings.spaces,
            options=settings.options(),
            node_keys={node: key.get_secret_value() for node, key in settings.node_keys.items()},
            ca_file=settings.ca_file,
            client_cert=settings.client_cert,
            client_key=settings.client_key,
            proxy=settings.proxy.get_secret_value() if settings.proxy else None,
            registering=registering,
        )

    def register(self, nodes: Mapping[str, str]) -> None:
        """Let these nodes, by URL with the API key of each ("" for none), be the ones beside `nodes`.

        They never get `api_key`. Those that were registered before and are not among these get no more requests.
        """
        wanted = {node_url(url): key for url, key in nodes.items()}
        added = {url: key for url, key in wanted.items() if url not in self._listed}
        self._node_keys.update(added)
        runtime = self.fleet.runtime
        runtime.remove(sorted(self._registered - added.keys()))
        runtime.add(sorted(added.keys() - self._registered))
        # The key of a node that was removed stays: a request that is under way there may try once more.
        self._registered = frozenset(added)

    @property
    def options(self) -> ClientOptions:
        """What the client was made with."""
        return self.core.options

    @property
    def spaces(self) -> Mapping[str, str]:
        """The vector space that each model is bound to."""
        return self.fleet.runtime.bindings.spaces

    def status(self) -> tuple[NodeStatus, ...]:
        """What is known of each node now, without asking."""
        return tuple(NodeStatus.of(node) for node in list(self._pool.nodes.values()))

    async def health(self) -> tuple[NodeStatus, ...]:
        """What is known of each node, once every node's first probe has ended."""
        await self.fleet.runtime.wait_probed()
        return self.status()

    def healthz(self) -> ClientStatus:
        """What a service may show on its own health endpoint; it makes no network calls."""
        nodes = self.status()
        usable = sum(node.usable for node in nodes)
        states = {node.url: node.status if node.usable or not node.trouble else node.trouble for node in nodes}
        return ClientStatus(usable > 0, usable, states, int(self.fleet.dispatcher.budget.balance))

    def __repr__(self) -> str:
        return f"NPUClient({list(self._pool.nodes)})"


def _check(nodes: object, api_key: object, spaces: object, options: object, *, registering: bool) -> None:
    """Raise ConfigurationError for arguments of another type. Node URLs are checked where they are parsed."""
    problem = None
    if isinstance(nodes, str) or not isinstance(nodes, Sequence) or not all(isinstance(node, str) for node in nodes):
        problem = "nodes must be a list of URLs"
    elif not nodes and not registering:
        problem = "nodes must have at least one URL: set NPU_CLIENT_NODES"
    elif api_key is not None and not isinstance(api_key, str | SecretStr):
        problem = f"api_key must be a str, got {type(api_key).__name__}"
    elif not isinstance(spaces, Mapping) or not all(
        isinstance(part, str) and part for item in spaces.items() for part in item
    ):
        problem = "spaces must map names of models to vector spaces (the `space` of a result)"
    elif not isinstance(options, ClientOptions):
        problem = f"options must be a backend_client.ClientOptions, got {type(options).__name__}"
    if problem is not None:
        raise ConfigurationError(problem)


class InferenceClient(BaseClient):
    """The same methods as NPUClient; what no node can serve goes to the cloud, where that is allowed.

    `ledger` counts what was kept local, what went to the cloud, and its cost. `local_only` forbids the cloud for all
    calls, and can be given to each. Closing it closes both clients.
    """

    def __init__(
        self,
        npu: NPUClient,
        cloud: CloudClient | None = None,
        *,
        local_only: bool = False,
        clock: Clock = time.monotonic,
    ) -> None:
        if not isinstance(npu, NPUClient) or not isinstance(cloud, BaseClient | None):
            raise ConfigurationError("InferenceClient takes an NPUClient and, for the fallback, a CloudClient")
        self.npu = npu
        self._cloud = cloud
        self._local_only = local_only
        self.ledger = cloud.ledger if cloud else Ledger({})
        backend = FallbackBackend(
            npu.fleet,
            cloud.service if cloud else None,
            self.ledger,
            npu.options.fallback,
            local_only=local_only,
        )
        super().__init__(backend, npu.fleet, npu.options, clock)

    @classmethod
    def from_settings(
        cls, settings: ClientSettings | None = None, *, registering: bool = False, **options: Any
    ) -> Self:
        """The client that the settings describe (read from file and environment when not given).

        `options` are settings that go before those. Raises ConfigurationError.
        """
        settings = ClientSettings.with_values(settings, options)
        cloud = None
        if settings.cloud is not None:
            # Imported lazily: slow, and only the cloud needs it.

            from backend_client.cloud.backend import CloudClient  # noqa: PLC0415  (imports the OpenAI SDK)

            cloud = CloudClient(settings.cloud, options=settings.options())
        npu = NPUClient.from_settings(settings, registering=registering)
        return cls(npu, cloud, local_only=settings.local_only)

    @property
    def cloud_breaker(self) -> BreakerState | None:
        """Whether all models that the cloud was asked for are ejected after failures; None without a cloud."""
        return None if self._cloud is None else self._cloud.service.state.best.state

    def healthz(self) -> ClientStatus:
        """What a service may show on its own health endpoint; it makes no network calls."""
        nodes = self.npu.healthz()
        if self._cloud is None:
            return nodes
        trouble = self._cloud.service.state.trouble()
        if self._local_only or self.core.nodes.calls.closed:
            trouble = "local_only is set" if self._local_only else "the client is closed"
        elif self.ledger.left == 0:
            trouble = "the spend cap is reached"
        return replace(
            nodes,
            serving=nodes.serving or not trouble,
            cloud="unavailable" if trouble else "available",
            cloud_trouble=trouble,
            cloud_cost=f"{self.ledger.cloud.cost:f}",
        )

    def __repr__(self) -> str:
        return f"InferenceClient({self.npu!r})"
