"""How much memory a model will take, before it has ever been loaded, and how much there is."""

from __future__ import annotations

from pathlib import Path

from worker_node.devices.memory import machine_memory
from worker_node.devices.probe import Probe
from worker_node.domain import Device
from worker_node.models.manifest import InstalledModel
from worker_node.serving.engine_plan import EnginePlan
from worker_node.serving.kv_cache import kv_cache_bytes
from worker_node.tasks.embed.static_options import StaticOptions
from worker_node.tasks.generate.continuous_options import ContinuousOptions
from worker_node.tasks.generate.stateful_options import StatefulOptions

HOST = "host"
# Measured on Linux with OpenVINO 2026.4: a process with the runtime and no model, then resident bytes for each byte of
# weights (the CPU plugin repacks int4 and int8).
_RUNTIME = 256 * 2**20
_CONTINUOUS, _STATEFUL, _OTHER = 2.0, 2.5, 1.2
_SHARE = 0.8
# Of a cache that grows as needed, what ordinary requests make it take.
_USUAL_TOKENS = 2048
_TOTAL_MEMORY = "GPU_DEVICE_TOTAL_MEM_SIZE"


def estimate_bytes(installed: InstalledModel, plan: EnginePlan) -> int:
    """Resident bytes of an engine process for this model: the runtime, the weights in its form, the KV cache."""
    files = installed.files.items()
    weights = sum(size for name, size in files if Path(name).suffix == ".bin") or installed.size
    cache = 0
    match plan.options:
        case StaticOptions(npu_buckets=buckets):
            factor = float(len(buckets))  # each static shape is compiled with a copy of the weights
        case ContinuousOptions(cache_size_gb=fixed):
            factor = _CONTINUOUS
            tokens = min(plan.total_limit, _USUAL_TOKENS)
            cache = fixed * 2**30 or kv_cache_bytes(installed.path, tokens) or 0
        case StatefulOptions():
            factor = _STATEFUL
            cache = kv_cache_bytes(installed.path, plan.total_limit) or 0
        case _:
            factor = _OTHER
    return _RUNTIME + int(weights * factor) + cache


def memory_pool(probe: Probe, device: Device) -> str:
    """Where models on a device have their memory: the host's, or a discrete GPU's own."""
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
