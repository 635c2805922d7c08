"""Compile a model ahead of time: an engine compiles it, writes blobs and answers its canary; another loads them.

For another machine's NPU it is compiled only: nothing here can run it.
"""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp

from worker_node.core.errors import ConfigurationError, EngineUnavailable
from worker_node.core.types import Device
from worker_node.devices.blobs import RECORD_FILE, BlobRecord, read_record
from worker_node.devices.npu import npu_source
from worker_node.devices.probe import DeviceInfo, probe
from worker_node.engines.options import BlobOptions, engine_for
from worker_node.engines.protocol import EngineState
from worker_node.models.directory import InstalledModel
from worker_node.serving.build import Machine, build_model, no_canary
from worker_node.settings import ModelSettings, NodeSettings, PlacementSettings


async def compile_ahead(
    installed: InstalledModel, wanted: ModelSettings, settings: NodeSettings, out: Path, platform: str | None = None
) -> BlobRecord:
    """Write the blobs of a model for this machine's NPU to the directory `out`, replacing older ones.

    The engines are those that `wanted` makes for the NPU; what is written has been loaded, and has passed the model's
    canary. With a `platform`, such as 4000, it is for another machine's NPU and was not run. Raises ConfigurationError
    when this kind of model has no blobs, `out` holds something else or the NPU is emulated that `platform` needs,
    EngineUnavailable when an engine does not become ready, OSError.
    """
    _check(installed, out)
    if platform is not None and settings.npu_emulation:
        raise ConfigurationError("--platform compiles for a real NPU: unset NPU_NODE_NPU_EMULATION")

    given = next((place for place in wanted.placements or () if place.device is Device.NPU), None)
    config = {} if given is None else dict(given.plugin_config)
    place = PlacementSettings(device=Device.NPU, load="lazy", plugin_config=config)
    options = {name: value for name, value in wanted.options.items() if name != "blobs"}
    wanted = wanted.model_copy(update={"placements": (place,), "options": options})

    out.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        npu = stack.enter_context(npu_source(settings.npu_sysfs, emulated=settings.npu_emulation))
        made = Path(mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        stack.callback(shutil.rmtree, made, ignore_errors=True)
        machine = Machine(settings, await probe(), npu)
        if platform is None:
            await _load(installed, wanted, replace(machine, export_blobs=made))
            with_blobs = wanted.model_copy(update={"options": options | {"blobs": str(made)}})
            await _load(installed, with_blobs, machine)
        else:
            # What is known of that NPU decides what may be compiled for it.
            other = DeviceInfo(Device.NPU.value, {"DEVICE_ARCHITECTURE": platform})
            machine = replace(machine, probe=replace(machine.probe, devices=(other,)))
            await _load(installed, wanted, replace(machine, export_blobs=made, platform=platform))
        _publish(made, out)
    return read_record(out)


def _check(installed: InstalledModel, out: Path) -> None:
    if not issubclass(engine_for(installed.kind, Device.NPU), BlobOptions):
        raise ConfigurationError(
            f"{installed.id}: models for {installed.kind} have no blobs; what is compiled for them is kept in "
            "compile_cache"
        )
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise ConfigurationError(f"--out {out} is not a directory; name one that does not exist")
    if out.is_dir() and any(out.iterdir()) and not (out / RECORD_FILE).is_file():
        raise ConfigurationError(f"--out {out} holds other files; name a directory that is new or empty")


async def _load(installed: InstalledModel, wanted: ModelSettings, machine: Machine) -> None:
    """Load the model on the NPU and run its canary, if it is this machine's. Raises EngineUnavailable."""
    guard = (lambda _canary: no_canary) if machine.platform is not None else (lambda canary: canary)
    engine = build_model(installed, wanted, machine, guard).placements[0].engine
    try:
        engine.wake()
        status = await engine.settled()
    finally:
        await engine.stop()
    if status.state is not EngineState.READY:
        raise EngineUnavailable(f"{installed.id} on NPU: {status.reason}")


def _publish(made: Path, out: Path) -> None:
    """Move a finished directory to its place, where a node that loads meanwhile finds it whole, or none."""
    made.chmod(0o755)
    shutil.rmtree(out, ignore_errors=True)
    made.rename(out)
