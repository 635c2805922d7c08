"""Certifies models again while nobody uses the node, after the driver, its compiler or OpenVINO changed.

Off by default (`recertify_after_s`). A certification takes the device alone: the engines there are unloaded for it. The
first request that comes ends the certification; it is tried again when the node has been idle long enough.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from worker_node.core.operating_system import tethered
from worker_node.core.types import Device
from worker_node.manager.manager import ModelManager
from worker_node.manager.placement import ExcludedPlacement, Placement, first_change
from worker_node.manager.served import FailedModel, ServedModel
from worker_node.models.catalog import normalise_name
from worker_node.node import Node
from worker_node.serving.certified import passport_store
from worker_node.settings import ModelSettings

log = logging.getLogger(__name__)

_LOOK_S = 5.0
# An update changes these; other weights or settings are the owner's decision, and his to certify.
_UPDATED = frozenset({"driver", "compiler", "openvino"})
# A certification that lasts longer hangs.
_LONGEST_S = 4 * 3600.0
# Whatever came of one, the next of the same model on the same device is not begun before.
_AGAIN_S = 24 * 3600.0

Build = Callable[[ModelSettings], ServedModel | FailedModel]


@dataclass(slots=True)
class Recertification:
    """Certifies the models of a node's settings again. `build` makes a model by its settings, with its new passport.

    `config` is the node's settings file.
    """

    node: Node
    build: Build
    config: Path | None
    look_s: float = _LOOK_S
    clock: Callable[[], float] = time.monotonic
    _ended: dict[tuple[str, Device], float] = field(default_factory=dict)

    async def run(self, idle_s: float) -> None:
        """Certify what has expired whenever no request ran for `idle_s` seconds, until cancelled."""
        while True:
            await asyncio.sleep(self.look_s)
            idle_since = self.node.state.idle_since
            if idle_since is None or time.monotonic() - idle_since < idle_s or self.node.state.draining:
                continue
            for wanted, device in self._expired():
                if not await self._certify(wanted, device):
                    break
                self._ended[wanted.name, device] = self.clock()

    def _expired(self) -> list[tuple[ModelSettings, Device]]:
        found = []
        for wanted in self.node.settings.models:
            model = _known(self.node.manager, wanted)
            known: list[Placement | ExcludedPlacement] = [*(() if model is None else model.excluded)]
            known += model.placements if isinstance(model, ServedModel) else ()
            for place in known:
                changed = place.standing.changed
                ended = self._ended.get((wanted.name, place.device), -math.inf)
                if changed and changed <= _UPDATED and self.clock() - ended >= _AGAIN_S:
                    found.append((wanted, place.device))
        return found

    async def _certify(self, wanted: ModelSettings, device: Device) -> bool:
        """Certify the model and serve it by its new passport; False if a request came before that was done."""
        places = [place for model in self.node.manager.models for place in model.placements]
        unloaded = [place for place in places if place.device is device and _has_process(place)]
        log.info("certifying %s on %s again: its passport expired, and nobody uses the node", wanted.name, device)
        certifying = asyncio.create_task(self._alone(unloaded, wanted, device), name=f"certify {wanted.name}")
        request = asyncio.create_task(self.node.state.busy(), name="wait for a request")
        try:
            await asyncio.wait((certifying, request), return_when=asyncio.FIRST_COMPLETED)
        finally:
            request.cancel()
            certifying.cancel()
            [problem] = await asyncio.gather(certifying, return_exceptions=True)
        if problem is None:
            await self._serve(wanted, unloaded)
            return True
        _load(unloaded)
        if isinstance(problem, asyncio.CancelledError):
            log.info("a request came: the certification of %s on %s is put off", wanted.name, device)
            return False
        log.error("%s on %s could not be certified again", wanted.name, device, exc_info=problem)
        return True

    async def _alone(self, loaded: list[Placement], wanted: ModelSettings, device: Device) -> None:
        """Unload the engines, and certify."""
        self.node.manager.unload_placements(loaded)
        while still := [place for place in loaded if _has_process(place)]:
            await first_change(still)
        settings = self.node.settings
        passports = passport_store(settings).directory
        config = [] if self.config is None else ["--config", str(self.config)]
        command = ["certify", wanted.name, "--device", device.value, "--quick", "--out", str(passports / "reports")]
        process = await asyncio.create_subprocess_exec(
            *tethered([sys.executable, "-m", "worker_node", *command, *config]),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            # What flags of the command line may have set.
            env={**os.environ, "NPU_NODE_MODEL_STORE": str(settings.model_store), "NPU_NODE_PASSPORTS": str(passports)},
        )
        try:
            async with asyncio.timeout(_LONGEST_S):
                _, said = await process.communicate()
        finally:
            # All that it started ends with it.
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if process.returncode:
            lines = said.decode(errors="replace").strip().splitlines()
            log.warning("%s on %s is not certified: %s", wanted.name, device, lines[-1] if lines else "no reason given")

    async def _serve(self, wanted: ModelSettings, unloaded: list[Placement]) -> None:
        """Serve the model by what its passports say now, and load the other engines again."""
        manager = self.node.manager
        new, old = await asyncio.to_thread(self.build, wanted), _known(manager, wanted)
        own = {id(place) for place in (old.placements if isinstance(old, ServedModel) else ())}
        _load([place for place in unloaded if id(place) not in own])
        if isinstance(old, FailedModel) and isinstance(new, ServedModel):
            manager.drop_failed(old.name)
            manager.add(new)
        elif isinstance(old, ServedModel) and isinstance(new, FailedModel):
            log.error("%s is served no longer: %s", wanted.name, new.reason)
            manager.fail(old, new)
        elif (
            isinstance(old, ServedModel)
            and isinstance(new, ServedModel)
            and (problem := await manager.turnover.replace(old, new)) is not None
        ):
            log.error("%s", problem)
            _load([place for place in unloaded if id(place) in own])


def _known(manager: ModelManager, wanted: ModelSettings) -> ServedModel | FailedModel | None:
    name = normalise_name(wanted.name)
    served = next((model for model in manager.models if normalise_name(model.id) == name), None)
    return served or next((model for model in manager.failed if normalise_name(model.name) == name), None)


def _has_process(place: Placement) -> bool:
    return place.engine.status.pid is not None


def _load(places: list[Placement]) -> None:
    for place in places:
        place.residency.request_load()
