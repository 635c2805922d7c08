"""Bindings of a client: the default model, and the vector space of each model name, fixed by its first use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from backend_client.errors import BadReply, ConfigurationError, SpaceChanged, VectorSpaceMismatch
from backend_client.fleet.node import Lease
from backend_client.fleet.pool import Pool
from backend_client.http.messages import KnownSpace, ModelReport, Reply, Request, Vectors, plain_name
from backend_client.http.routes import dimensions_asked

# Stands for the default model, if the cloud answered before a node named it. No caller can name a model so.
_NO_MODEL = "\0"


class Bindings:
    """Made once and kept for the client's life, because the caller compares the vectors of all its calls.

    A space is bound to the name that callers use, be it an id or an alias: a node may change the model behind a name.
    `spaces` are bindings given in advance; they apply to the name in a request and to the model that answers it.
    """

    def __init__(self, pool: Pool, spaces: Mapping[str, str]) -> None:
        self._pool = pool
        self._declared = {plain_name(name): space for name, space in spaces.items()}
        self._spaces = dict(self._declared)
        self._dimensions: dict[str, int] = {}
        # A single binding given in advance names the default embedding model.
        self._defaults: dict[str, str] = {"embedding": next(iter(spaces))} if len(spaces) == 1 else {}

    @property
    def spaces(self) -> Mapping[str, str]:
        """The vector space of each name that is bound, in lower case."""
        return {name: space for name, space in self._spaces.items() if name != _NO_MODEL}

    def complete(self, request: Request) -> bool:
        """Fill in the default model and its space, as far as they are known.

        False where that needs a decision that must wait until every node's first probe has ended: otherwise the node
        that answers its probe first would decide, and two processes could decide differently.

        Raises ConfigurationError when no model is named and the fleet has several, VectorSpaceMismatch when its only
        one is bound to another space than the one in which the cloud answered before.
        """
        embeds = request.kind == "embedding"
        model = request.model or self._defaults.get(request.kind)
        if (model is None or (embeds and plain_name(model) not in self._spaces)) and self._pool.unseen:
            return False
        model = model or self.default_model(request.kind)
        if embeds and model is not None:
            if request.model is None and _NO_MODEL in self._spaces:
                self.bind(model, self._spaces[_NO_MODEL])
            request.space = KnownSpace(self.space(model))
        request.model = model
        return True

    def default_model(self, kind: str) -> str | None:
        """The only model of that kind in the fleet, from then on always the same; None while no node has reported one.

        Where no model is for generation alone, the one for vision is asked for texts too.

        Raises ConfigurationError when there are several: which of them is meant must not depend on the nodes that
        happen to answer first.
        """
        default = self._defaults.get(kind)
        if default is None and not self._pool.unseen:
            names = self._names(kind)
            if not names and kind == "generation":
                names = self._names("vision")
            if len(names) > 1:
                raise ConfigurationError(
                    f"the fleet has {len(names)} {kind} models, and the call names none: "
                    f"give model= one of {', '.join(names)}"
                )
            if names:
                default = self._defaults[kind] = names[0]
        return default

    @property
    def unknown(self) -> bool:
        """Whether no vector space is bound, and no node has reported one."""
        return not self._spaces and all(model.space is None for model in self._all_reports())

    def bind(self, model: str | None, space: str) -> None:
        """Bind a model (None: the default) to the space in which the cloud answered for it.

        Raises VectorSpaceMismatch if it is bound to another one by now.
        """
        if model is None and _NO_MODEL not in self._spaces:
            model = self._defaults.get("embedding")
        name = model or _NO_MODEL
        if (bound := self._spaces.setdefault(plain_name(name), space)) != space:
            raise VectorSpaceMismatch(
                f"the cloud answered for {name} in the vector space {space}, but the nodes answer in {bound}; correct "
                f"cloud.embedding_models, or bind the space with spaces.{name}"
            )

    def space(self, name: str) -> str | None:
        """The space that answers to requests for `name` (an id or an alias) must be in; None while none is known.

        A name is bound when it is first requested: to the space that most nodes report for it. For a model whose space
        was declared that one counts, not what its node reports.
        """
        key = plain_name(name)
        bound = self._spaces.get(key)
        if bound is None:
            reported = (self._declared.get(plain_name(model.id), model.space) for model in self._reports(name))
            counts = Counter(space for space in reported if space is not None)
            if counts:
                # On a tie not the first node: every process must choose the same.
                bound = self._spaces[key] = min(counts, key=lambda space: (-counts[space], space))
        return bound

    def known(self, model: str | None) -> KnownSpace:
        """What is known of the space that an answer of the model (None: the default) is in."""
        bound = self._spaces.get(_NO_MODEL) if model is None else None
        name = model or self.default_model("embedding")
        if name is None:
            return KnownSpace(bound)
        space = bound or self.space(name)
        reports = [report for report in self._reports(name) if report.space == space]
        limits = [report.context_limit for report in reports if report.context_limit is not None]
        lengths = {report.dimensions for report in reports if report.dimensions is not None}
        dimensions = self._dimensions.get(space or "") or (lengths.pop() if len(lengths) == 1 else None)
        return KnownSpace(space, dimensions, min(limits, default=None))

    def bind_dimensions(self, space: str, dimensions: int) -> None:
        """Bind the length of vectors in a space, for callers who keep such vectors."""
        self._dimensions[space] = dimensions

    def check(self, lease: Lease, reply: Reply, vectors: Vectors) -> None:
        """Check an answer against the name that was requested, the report of the node that gave it, and the bindings.

        A name that is not bound yet is bound to the space of the answer. Vectors that were cut are in the space
        `SPACE-DIMENSIONS`; the name is bound to `SPACE`. Raises SpaceChanged for an answer in another space than the
        one that was requested, or is bound, BadReply for one without a space, or vectors that cannot be in that space.
        """
        node, space = lease.node.url, reply.headers.get("x-space")
        model = reply.headers.get("x-model") or lease.model
        if not space:
            raise BadReply("the reply lacks X-Space: these are not a node's vectors", node=node)
        # A request without texts gets no vectors.
        if not len(vectors):
            return
        dimensions = vectors.shape[1]
        asked = dimensions_asked(lease.request) if lease.request.body.get("dimensions") else None
        if asked is not None and dimensions != asked:
            raise BadReply(f"{asked} dimensions were asked for, vectors of {dimensions} came", node=node)
        cut_from = space.removesuffix(f"-{asked}")
        requested = lease.request.model or model
        key = plain_name(requested)
        # What was declared for the model that answered also counts, unless the requested name has a declaration itself.
        declared = None if key in self._declared else self._declared.get(plain_name(model))
        for fixed in (declared, self._spaces.get(key)):
            if fixed is not None and fixed != cut_from:
                name = requested if plain_name(model) == key else f"{requested} ({model} there)"
                raise SpaceChanged(
                    f"{name} answered in the vector space {space}, this client is bound to {fixed}", node=node
                )
        report = lease.node.models.get(lease.model)
        own = report.dimensions if report is not None and report.space == cut_from else None
        bound = self._dimensions.get(cut_from)
        for expected, who in ((own, "its own /health says"), (bound, "that space has")):
            wrong = expected is not None and (dimensions > expected or (space == cut_from and dimensions != expected))
            if wrong:
                what = f"vectors of {dimensions} dimensions came for the vector space {space}"
                raise BadReply(f"{what}; {who} {expected}", node=node, contradicts=True)
        self._spaces[key] = cut_from

    def _names(self, kind: str) -> list[str]:
        return sorted({model.id for model in self._all_reports() if model.kind == kind})

    def _reports(self, name: str) -> Iterator[ModelReport]:
        return (found for node in self._pool.nodes.values() if (found := node.resolve(name)) is not None)

    def _all_reports(self) -> Iterator[ModelReport]:
        return (model for node in self._pool.nodes.values() for model in node.models.values())
