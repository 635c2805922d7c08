"""What earlier answers bind later calls to: the default model, and the vector space of each model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

from backend_client.errors import SpaceChanged
from backend_client.fleet.node import Node, Requirement
from backend_client.fleet.report import ModelReport

_REMEMBERED = 256


class Bindings:
    """Made once, kept for the client's life: vectors of two calls are compared with each other by the caller.

    `spaces` are bindings given in advance, for callers that keep vectors longer than that.
    """

    def __init__(self, nodes: Mapping[str, Node], spaces: Mapping[str, str]) -> None:
        self._nodes = nodes
        self._spaces = dict(spaces)
        # Who binds one embedding model in advance means that one by "the" embedding model.
        self._complete: dict[Requirement, Requirement] = {}
        self._defaults: dict[str, str] = {"embedding": next(iter(spaces))} if len(spaces) == 1 else {}

    @property
    def spaces(self) -> Mapping[str, str]:
        """The vector space of each model that is bound."""
        return self._spaces

    def complete(self, need: Requirement) -> Requirement:
        """The requirement with the default model and its space filled in, as far as they are known."""
        known = self._complete.get(need)
        if known is not None:
            return known
        model = need.model or self.default_model(need.kind)
        space = self.space(model) if need.kind == "embedding" and model is not None else None
        completed = replace(need, model=model, space=space)
        if model is not None and (space is not None or need.kind != "embedding"):
            # What is bound stays bound. The bound on their number is for callers who make up names.
            if len(self._complete) >= _REMEMBERED:
                self._complete.clear()
            self._complete[need] = completed
        return completed

    def default_model(self, kind: str) -> str | None:
        """The first model of that kind on the first node that is known; from then on always the same."""
        default = self._defaults.get(kind)
        if default is None:
            reports = (node.report for node in self._nodes.values() if node.report is not None)
            default = next((model.id for report in reports for model in report.models if model.kind == kind), None)
            if default is not None:
                self._defaults[kind] = default
        return default

    def space(self, model: str) -> str | None:
        """The space that answers of this model (an id or an alias) must be in; None while no node has told one.

        A model is bound when it is first asked for: to the space that most nodes report, the first of them on a tie.
        """
        bound = self._spaces.get(model)
        if bound is None:
            reported = Counter(report.space for report in self._reports(model) if report.space is not None)
            if reported:
                bound = self._spaces[model] = reported.most_common(1)[0][0]
        return bound

    def known_space(self, model: str | None) -> tuple[str | None, int | None]:
        """The space that an answer of the model (None: the default) is in, and its dimensions, as far as known."""
        name = model or self.default_model("embedding")
        if name is None:
            return None, None
        space = self.space(name)
        dimensions = (report.dimensions for report in self._reports(name) if report.space == space)
        return space, next(dimensions, None)

    def check(self, node: str, model: str, space: str) -> None:
        """Raise SpaceChanged for an answer in another space; a model that is not bound yet is bound to this one."""
        bound = self._spaces.setdefault(model, space)
        if bound != space:
            raise SpaceChanged(
                f"{model} answered in the vector space {space}, this client is bound to {bound}", node=node
            )

    def _reports(self, model: str) -> Iterator[ModelReport]:
        return (found for node in self._nodes.values() if (found := node.resolve(model)) is not None)
