"""A configured model whose files are missing or damaged, while the others serve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from worker_node.manager.served import ServedModel
from worker_node.models.catalog import normalise_name


@dataclass(frozen=True, slots=True)
class FailedModel:
    """A configured model by its `name` and `aliases`; `reason` names the file and what to do.

    `build` tries again, after the files were repaired; it raises what is wrong with them. `installed`: there are files.
    """

    name: str
    reason: str
    build: Callable[[], ServedModel]
    aliases: Sequence[str] = ()
    installed: bool = True

    def answers_to(self, name: str) -> bool:
        """Whether a request with that name means this model."""
        return normalise_name(name) in {normalise_name(known) for known in (self.name, *self.aliases)}
