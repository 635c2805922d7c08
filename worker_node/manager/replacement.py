"""One replacement of a served model: where its later form must be loaded before it serves in place of the earlier one.

These are the device that the settings have it loaded on first, and each device that the earlier form serves on. On the
others it is loaded beside the earlier form, within the memory that is free; where there is none, it is loaded later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass

from worker_node.engines.protocol import EngineState
from worker_node.manager.placement import Placement
from worker_node.manager.served import ServedModel

_DOWN = frozenset({EngineState.BACKING_OFF, EngineState.QUARANTINED, EngineState.FAILED, EngineState.STOPPED})


@dataclass(frozen=True, slots=True)
class _Awaited:
    """A placement that is to be ready; `earlier` is the one that serves until then, None if it is awaited anyhow."""

    placement: Placement
    earlier: Placement | None

    @property
    def needed(self) -> bool:
        """Whether the change-over depends on it: an earlier one that has left or failed serves nobody meanwhile."""
        return self.earlier is None or self.earlier.engine.ready

    @property
    def loading(self) -> bool:
        """Whether it is still to be waited for."""
        return self.needed and self.placement.state is EngineState.STARTING

    @property
    def failed(self) -> bool:
        """Whether a change-over would take away a device that serves."""
        return self.needed and self.placement.engine.status.state in _DOWN


class Replacement:
    """The placements of `new` that are to be ready before it serves in place of `old`. Attend to `new` after this."""

    def __init__(self, old: ServedModel, new: ServedModel) -> None:
        serving = {placement.device: placement for placement in old.placements if placement.engine.ready}
        self._awaited: list[_Awaited] = []
        for index, placement in enumerate(new.placements):
            if index == 0 and placement.eager:
                self._awaited.append(_Awaited(placement, None))
            elif (earlier := serving.get(placement.device)) is not None:
                placement.residency.spare = True
                self._awaited.append(_Awaited(placement, earlier))

    @property
    def failed(self) -> Placement | None:
        """The first placement that could not be loaded though the earlier form serves there."""
        return next((awaited.placement for awaited in self._awaited if awaited.failed), None)

    async def settled(self) -> None:
        """Have them loaded; wait until each is ready, or one failed, or memory does not hold it beside the old one."""
        for awaited in self._awaited:
            awaited.placement.residency.want()
        while self._undecided():
            changes = [asyncio.ensure_future(change) for awaited in self._awaited for change in _changes(awaited)]
            try:
                await asyncio.wait(changes, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for change in changes:
                    change.cancel()

    def finish(self) -> None:
        """The later form serves now: requests wait for what it has to load, and it is loaded as any other."""
        for awaited in self._awaited:
            placement, residency = awaited.placement, awaited.placement.residency
            residency.spare = False
            if placement.engine.ready:
                continue
            if placement.eager:
                residency.want(on_request=True)
            elif placement.engine.status.state is EngineState.UNLOADED:  # a request will have it loaded
                residency.settle()
                residency.refusal = None

    def _undecided(self) -> bool:
        first = self._awaited[0] if self._awaited else None
        if first is not None and first.earlier is None and not (first.loading or first.placement.engine.ready):
            return False  # it failed, or not both forms fit: nothing is gained by waiting for the others
        return self.failed is None and any(awaited.loading for awaited in self._awaited)


def _changes(awaited: _Awaited) -> list[Coroutine[None, None, object]]:
    """What to await for whatever changes the decision, from this call on."""
    engines = [awaited.placement.engine] + ([] if awaited.earlier is None else [awaited.earlier.engine])
    return [awaited.placement.residency.change(), *(engine.next_change() for engine in engines)]
