"""Estimates a model's memory before its first load, and the memory that the engines may take."""

from __future__ import annotations

from pathlib import Path

from worker_node.core.types import Device
from worker_node.devices.memory import machine_memory
from worker_node.devices.probe import Probe
from worker_node.models.manifest import InstalledModel
from worker_node.serving.task import EnginePlan, served_task

HOST = "host"
# Measured on Linux with OpenVINO 2026.4: a process with the runtime and no model.
_RUNTIME = 256 * 2**20
_SHARE = 0.8
_TOTAL_MEMORY = "GPU_DEVICE_TOTAL_MEM_SIZE"


def estimate_bytes(installed: InstalledModel, plan: EnginePlan) -> int:
    """Resident bytes of an engine process for this model: the runtime, the weights in its form, the KV cache."""
    files = installed.files.items()
    weights = sum(size for name, size in files if Path(name).suffix == ".bin") or installed.size
    footprint = served_task(installed.kind).footprint(installed, plan)
    return _RUNTIME + int(weights * footprint.weights) + footprint.extra


def memory_pool(probe: Probe, device: Device) -> str:
    """The pool that models on a device take memory from: the host's, or a discrete GPU's own."""
    return device.value if _own_memory(probe, device) is not None else HOST


def memory_budgets(wanted: int | None, probe: Probe) -> dict[str, int | None]:
    """Bytes that the engines together may take, by pool. `wanted` None is 80 % of what the host has free now."""
    memory = machine_memory()
    host = wanted if wanted is not None or memory is None else int(memory.available * _SHARE)
    own = _own_memory(probe, Device.GPU)
    return {HOST: host} | ({} if own is None else {Device.GPU.value: int(own * _SHARE)})


def _own_memory(probe: Probe, device: Device) -> int | None:
    """Bytes of a device that does not share the host's memory and says how much it has."""
    info = probe.find(device)
    if info is None or "(dGPU)" not in (info.properties.get("FULL_DEVICE_NAME") or ""):
        return None
    total = info.properties.get(_TOTAL_MEMORY)
    return int(total) if total is not None and total.isdecimal() else None
