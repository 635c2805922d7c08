"""Served models by every name that a request may use for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from worker_node.core.errors import ModelNotFound
from worker_node.manager.served import ServedModel
from worker_node.models.catalog import Catalog, normalise_name


class Names:
    """The served models, in the order of the settings; the first of each kind is the default."""

    def __init__(self, catalog: Catalog, models: Iterable[ServedModel] = ()) -> None:
        self.models: tuple[ServedModel, ...] = ()
        self._catalog = catalog
        self._by_id: dict[str, ServedModel] = {}
        self._by_alias: dict[str, ServedModel] = {}
        # The names of the sources that models were pulled from.
        self._by_source: dict[str, ServedModel] = {}
        for model in models:
            self.add(model)

    def add(self, model: ServedModel) -> None:
        """Serve one more model."""
        self.models = (*self.models, model)
        self._by_id[normalise_name(model.id)] = model
        self._by_alias |= {normalise_name(alias): model for alias in model.aliases}
        for alias in model.installed.aliases:
            self._by_source.setdefault(normalise_name(alias), model)

    def drop(self, model: ServedModel) -> None:
        """Stop serving a model: requests find it no longer."""
        self.models = tuple(other for other in self.models if other is not model)
        self._by_id.pop(normalise_name(model.id), None)
        self._by_alias = {alias: other for alias, other in self._by_alias.items() if other is not model}
        self._by_source = {alias: other for alias, other in self._by_source.items() if other is not model}

    def swap(self, old: ServedModel, new: ServedModel) -> None:
        """Replace `old` by `new` between two requests."""
        models = [new if model is old else model for model in self.models]
        self.drop(old)
        self.add(new)
        self.models = tuple(models)

    def arrange(self, ids: Sequence[str]) -> None:
        """Set the order of these models, others after them: the first of a kind is its default."""
        places = {normalise_name(name): place for place, name in enumerate(ids)}
        self.models = tuple(sorted(self.models, key=lambda m: places.get(normalise_name(m.id), len(places))))

    def aliases(self, model: ServedModel) -> list[str]:
        """The names beside its id that `find` takes for the model, in lower case."""
        entry = self._catalog.find(model.id)
        known = entry.aliases if entry and normalise_name(entry.id) == normalise_name(model.id) else ()
        names = {
            normalise_name(name) for name in (*model.aliases, *model.installed.aliases, *known)
        } - self._by_id.keys()
        return sorted(n for n in names if self._by_alias.get(n, self._by_source.get(n, model)) is model)

    def default(self, kind: str) -> ServedModel:
        """The model for requests that name none. Raises ModelNotFound."""
        for model in self.models:
            if model.installed.kind == kind:
                return model
        raise ModelNotFound(f"this node serves no {kind} model; it serves: {self._known()}", param="model")

    def find(self, name: str) -> ServedModel:
        """The model of that id, else alias of the settings, source, alias of the catalog. Raises ModelNotFound."""
        wanted = normalise_name(name)
        found = self._by_id.get(wanted) or self._by_alias.get(wanted) or self._by_source.get(wanted)
        if found is None and (entry := self._catalog.find(name)) is not None:
            found = self._by_id.get(normalise_name(entry.id))
        if found is None:
            raise ModelNotFound(f"model {name[:100]!r} is not served here; served: {self._known()}", param="model")
        return found

    def _known(self) -> str:
        return ", ".join(model.id for model in self.models) or "none"
