"""Brings the engines to the desired state: one loop that observes, decides (`policy`) and acts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from worker_node.devices.memory import resident_memory
from worker_node.engines.protocol import EngineState
from worker_node.manager.placement import Placement
from worker_node.manager.policy import DoesNotFit, Key, Plan, Unit, UnitState, Why, plan_memory
from worker_node.manager.served import Names, ServedModel
from worker_node.manager.work import BackgroundTasks

log = logging.getLogger(__name__)

_PERIOD_S = 2.0
_RETRY_S = 0.5
_MB = 1e6
_STATES = {
    EngineState.UNLOADED: UnitState.UNLOADED,
    EngineState.STARTING: UnitState.LOADING,
    EngineState.READY: UnitState.READY,
    EngineState.BACKING_OFF: UnitState.DOWN,
    EngineState.QUARANTINED: UnitState.DOWN,
    EngineState.FAILED: UnitState.DOWN,
    EngineState.STOPPED: UnitState.UNLOADING,
}


class Reconciler:
    """Loads and unloads the engines of the served models and of the `unserved` ones, within `budgets` (bytes by pool).

    Those serve no new requests: earlier forms of models that finish their requests, and later forms that are being
    loaded. `clock` is monotonic seconds, the event loop's own; `measure` gives a process's memory.
    """

    def __init__(
        self,
        names: Names,
        budgets: Mapping[str, int | None],
        *,
        clock: Callable[[], float] = time.monotonic,
        measure: Callable[[int], int | None] = resident_memory,
    ) -> None:
        self.budgets = dict(budgets)
        self.unserved: list[ServedModel] = []
        self._names = names
        self._clock = clock
        self._measure = measure
        self._started = False
        self._poked = asyncio.Event()
        self._decided = asyncio.Event()
        self._tasks = BackgroundTasks()
        self._watches: dict[Placement, asyncio.Task[None]] = {}
        # Models that have changed since the node read them.
        self.stale: asyncio.Queue[ServedModel] = asyncio.Queue()

    def poke(self) -> None:
        self._poked.set()

    async def decided(self) -> None:
        """Wait for the next decision, which comes soon, once the loop runs."""
        self.poke()
        if self._started:
            await self._decided.wait()

    def start(self) -> None:
        """Start the loop, which from then on is the only one to load the served models."""
        self._started = True
        self._tasks.start(self._run(), "model manager")
        for model in self._names.models:
            self.manage(model)

    def add(self, model: ServedModel) -> None:
        """Serve one more model, and manage it once the loop runs."""
        self._names.serve([*self._names.models, model])
        if self._started:
            self.manage(model)

    def manage(self, model: ServedModel) -> None:
        """Manage one more model, and load those of its engines that are loaded at start."""
        model.activity.on_idle = self.poke
        for placement, following in zip(model.placements, [*model.placements[1:], None], strict=True):
            placement.on_change = self.poke
            if placement not in self._watches:
                self._watches[placement] = self._tasks.start(
                    self._watch(model, placement, following), f"watch {model.id}"
                )
                if placement.eager:
                    placement.request_load()
        self.poke()

    def release(self, model: ServedModel) -> None:
        for placement in model.placements:
            placement.on_change = placement.request = None
            placement.changed()
            if (watch := self._watches.pop(placement, None)) is not None:
                watch.cancel()
        self.poke()

    def never_fits(self, model: ServedModel, placement: Placement, *, without: ServedModel) -> str | None:
        """Why a load would not fit even if `without`, and every served model that is not pinned, were unloaded."""
        wanted = replace(self._observe(model, placement), state=UnitState.UNLOADED, wanted_since=0.0)
        units = {wanted.key: (model, placement)}
        snapshot = [wanted]
        for other in self._names.models:
            for its in other.placements if other is not without else ():
                snapshot.append(self._observe(other, its))
                units[snapshot[-1].key] = (other, its)
        plan = plan_memory(snapshot, self.budgets, self._clock())
        never = (refusal for refusal in plan.refusals if refusal.key == wanted.key and not refusal.waits)
        return next((_text(refusal, snapshot, units, plan) for refusal in never), None)

    async def close(self) -> None:
        await self._tasks.close()

    async def _watch(self, model: ServedModel, placement: Placement, following: Placement | None) -> None:
        """When an engine goes down, load the placement after it: a model that is never ready gets no requests."""
        down = False
        while True:
            await placement.engine.next_change()
            if placement.engine.status.stale:
                self.stale.put_nowait(model)
            was_down, down = down, _STATES[placement.state] is UnitState.DOWN
            loadable = following is not None and (following.queued or following.state is EngineState.UNLOADED)
            if down and not was_down and following is not None and loadable:
                following.request_load()
            self.poke()

    async def _run(self) -> None:
        while True:
            self._poked.clear()
            try:
                decide_at = self._reconcile()
            except Exception:  # one error must not end the only loop that loads models
                log.exception("the models could not be reconciled; trying again")
                decide_at = self._clock() + _PERIOD_S
            decided, self._decided = self._decided, asyncio.Event()
            decided.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if decide_at is None else max(0.0, decide_at - self._clock())):
                    await self._poked.wait()

    def _reconcile(self) -> float | None:
        """Observe, decide and act once; return when to decide again if nothing happens before."""
        units: dict[Key, tuple[ServedModel, Placement]] = {}
        snapshot: list[Unit] = []
        turning_over = False
        for number, model in enumerate((*self._names.models, *self.unserved)):
            for placement in model.placements:
                unit = self._observe(model, placement)
                if unit.key in units:  # a later form that is being loaded, or an earlier one that finishes its requests
                    # It ends by itself; until then no load is refused for the memory that it takes.
                    busy = unit.busy or model.activity.idle_since is not None
                    unit = replace(unit, key=(f"{model.id} ({number})", unit.key[1]), busy=busy, pinned=False)
                    turning_over = True
                units[unit.key] = (model, placement)
                snapshot.append(unit)
        awaited = turning_over or any(unit.wanted_since is not None or unit.unload_when_idle for unit in snapshot)
        for model in (*self._names.models, *self.unserved):
            # Where no request waits for memory, and none for a model to leave, the next decision is soon enough.
            model.activity.on_idle = self.poke if awaited else None
        now = self._clock()
        plan = plan_memory(snapshot, self.budgets, now)
        for key in plan.loads:
            self._load(*units[key])
        for key, why in plan.unloads:
            model, placement = units[key]
            if not placement.unloading:
                placement.unloading = True
                self._tasks.start(self._unload_idle(model, placement, why), f"unload {model.id}")
        short = {refusal.key for refusal in plan.refusals}
        for key, (_, placement) in units.items():
            if placement.request is not None and key not in short:
                placement.request.shortage = None
        for refusal in plan.refusals:
            self._refuse(units[refusal.key][1], refusal, _text(refusal, snapshot, units, plan))
        loaded = any(unit.state in {UnitState.LOADING, UnitState.READY} for unit in snapshot)
        # Memory changes without notice, and models become idle.
        times = [plan.decide_at, now + _PERIOD_S if loaded else None]
        return min((at for at in times if at is not None), default=None)

    def _observe(self, model: ServedModel, placement: Placement) -> Unit:
        status = placement.engine.status
        state = UnitState.UNLOADED if placement.queued else _STATES[placement.state]
        if placement.unloading:
            state = UnitState.UNLOADING
        elif placement.state is EngineState.STOPPED and status.pid is None:
            state = UnitState.UNLOADED
        memory = None if status.pid is None else self._measure(status.pid)
        placement.observe(memory)
        held = max(placement.memory, memory or 0) if state is UnitState.LOADING else memory or placement.memory
        return Unit(
            key=(model.id, placement.device.value),
            device=placement.device.value,
            pool=placement.pool,
            memory=0 if placement.state.given_up else held,
            state=state,
            last_use=max(placement.used_at, placement.ready_at),
            wanted_since=None if placement.request is None else placement.request.since,
            busy=model.may_need(placement),
            pinned=placement.pinned,
            keep_until=model.unloads_at(),
            unload_when_idle=placement.unload_when_idle,
        )

    def _load(self, model: ServedModel, placement: Placement) -> None:
        placement.unload_when_idle = False
        seconds = placement.expected_load_s()
        duration = "for the first time, which takes minutes" if math.isinf(seconds) else f"{seconds:.0f} s"
        log.info("loading %s on %s: about %.0f MB, %s", model.id, placement.device, placement.memory / _MB, duration)
        placement.engine.wake()
        placement.changed()
        self.poke()

    async def _unload_idle(self, model: ServedModel, placement: Placement, why: Why) -> None:
        try:
            # A request may have come since the decision.
            if not model.may_need(placement) and await placement.engine.unload():
                log.info("unloaded %s on %s: %s", model.id, placement.device, why)
                placement.unload_when_idle = False
                if why in {Why.EXPIRED, Why.ASKED}:
                    model.activity.kept = None
            else:
                # The canary asks it something: soon over.
                await asyncio.sleep(_RETRY_S)
        finally:
            placement.unloading = False
            placement.changed()
            self.poke()

    @staticmethod
    def _refuse(placement: Placement, refusal: DoesNotFit, text: str) -> None:
        request, new = placement.request, True
        if refusal.waits and request is not None:
            new, request.shortage = request.shortage is None, text
        else:
            placement.refusal, placement.request = text, None
        if new:
            log.warning("%s", text)
            placement.changed()


def _text(
    refusal: DoesNotFit, snapshot: list[Unit], units: Mapping[Key, tuple[ServedModel, Placement]], plan: Plan
) -> str:
    seen = {unit.key: unit for unit in snapshot}
    leaving = {key for key, _ in plan.unloads}
    holding = ", ".join(
        f"{units[key][0].id} on {key[1]} {seen[key].memory / _MB:.0f} MB ({_hold(seen[key], leaving=key in leaving)})"
        for key in refusal.in_the_way
    )
    model, placement = units[refusal.key]
    needs = f"{model.id} on {placement.device} needs about {refusal.need / _MB:.0f} MB of memory"
    budget = f"the budget for models is {refusal.budget / _MB:.0f} MB"
    if not holding:
        return f"{needs}; {budget}, and nothing else holds any of it. Raise memory_budget (NPU_NODE_MEMORY_BUDGET)"
    return (
        f"{needs}; {budget}, of which these hold: {holding}. Unload one of them (POST /models/MODEL/unload), or raise "
        "memory_budget (NPU_NODE_MEMORY_BUDGET)"
    )


def _hold(unit: Unit, *, leaving: bool) -> str:
    if unit.state is UnitState.UNLOADING or leaving:
        return "leaving"
    if unit.state in {UnitState.LOADING, UnitState.UNLOADED}:
        return "loading"
    if unit.pinned:
        return "configured"
    return "in use" if unit.busy else "idle"
