"""Takes models out of service and puts others in their place, without dropping a request."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable

from worker_node.manager.names import Names
from worker_node.manager.reconciler import Reconciler
from worker_node.manager.replacement import Replacement
from worker_node.manager.served import ServedModel

log = logging.getLogger(__name__)

# So long after its engines have ended nobody else refers to a model any more.
_COLLECT_S = 1.0


class Turnover:
    """Retires and replaces served models. `models` are those that serve no new requests but still have engines:
    earlier forms that finish their requests, and later ones that are being loaded."""

    def __init__(self, names: Names, reconciler: Callable[[], Reconciler]) -> None:
        self._names = names
        self._reconciler_of = reconciler
        self.models: list[ServedModel] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def _reconciler(self) -> Reconciler:
        return self._reconciler_of()

    async def retire(self, model: ServedModel, *, drain: bool = True) -> None:
        """Stop serving a model: new requests do not find it; its engines end after its last request, or now."""
        self._names.drop(model)
        self.models.append(model)
        if drain:
            await self._drain(model)
        else:
            await self._forget(model)

    def retire_later(self, model: ServedModel) -> None:
        """As `retire`, after the last request; returns at once."""
        self._names.drop(model)
        self._start(model)

    async def replace(self, old: ServedModel, new: ServedModel) -> str | None:
        """Serve `new` in place of `old`, which serves until `new` is ready wherever it must be (see `Replacement`), and
        until its own last request.

        Where memory holds only one of them, requests wait while `new` is loaded. Returns why `new` could not be
        loaded; then `old` serves on.
        """
        replacement = Replacement(old, new)
        self.models.append(new)
        self._reconciler.attend(new)
        try:
            await replacement.settled()
        finally:
            self.models.remove(new)
        if (failed := replacement.failed) is not None:
            reason = failed.engine.status.reason
            await self._stop(new)
            return (
                f"{new.id} could not be loaded on {failed.device} with its new settings, and serves with the earlier "
                f"ones: {reason}"
            )
        if not any(model is old for model in self._names.models):
            await self._stop(new)
            return f"{new.id} was removed while it was loaded with its new settings"
        self._swap(old, new)
        replacement.finish()
        return None

    async def close(self) -> None:
        """End the models that are being retired, with their remaining requests."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(self._stop(model, "the node is shutting down") for model in self.models))

    def _swap(self, old: ServedModel, new: ServedModel) -> None:
        self._names.swap(old, new)
        self._reconciler.attend(new)
        self._start(old)

    def _start(self, model: ServedModel) -> None:
        # Counted as one of ours from now on, so that its engines are attended until the task begins.
        self.models.append(model)
        task = asyncio.create_task(self._drain(model), name=f"retire {model.id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _drain(self, model: ServedModel) -> None:
        await model.activity.idle()
        await self._forget(model)
        log.info("model %s: its engines have ended after their last request", model.id)

    async def _forget(self, model: ServedModel) -> None:
        # One of ours until its processes have ended: `close` may come before that, and their memory is not free.
        await self._stop(model)
        self.models.remove(model)
        self._reconciler.poke()

    async def _stop(self, model: ServedModel, reason: str = "the model was removed") -> None:
        self._reconciler.leave(model)
        await asyncio.gather(*(placement.engine.stop(reason) for placement in model.placements))
        # Parts of a model refer to one another. Left to the collector, which seldom looks at what is old, it keeps its
        # tokenizer for many reloads: threads, open files and 7 MB each.
        asyncio.get_running_loop().call_later(_COLLECT_S, gc.collect)
