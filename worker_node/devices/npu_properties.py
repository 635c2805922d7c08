"""The properties with which something is compiled for the NPU, real or emulated."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import openvino as ov

from worker_node.devices.busy import BusyMeter
from worker_node.devices.emulation import EMULATED_NAME, NPU_ON_CPU, StandInWriter
from worker_node.devices.npu_counters import SysfsCounter

NPU = "NPU"


def npu_properties(
    *, emulated: bool, cache_dir: str | None, plugin_config: Mapping[str, Any], **named: Any
) -> dict[str, Any]:
    """Merge the named properties (None: left to OpenVINO) with the user's own; what emulation needs comes last."""
    properties = {key: value for key, value in named.items() if value is not None}
    if cache_dir is not None:
        properties["CACHE_DIR"] = cache_dir
    properties |= plugin_config
    return properties | NPU_ON_CPU if emulated else properties


def describe_npu(core: ov.Core, *, emulated: bool) -> tuple[str, str | None]:
    """The device's full name and the version of its driver, each as far as it can be read."""
    if emulated:
        return EMULATED_NAME, None
    return str(read_property(core, "FULL_DEVICE_NAME") or NPU), read_property(core, "NPU_DRIVER_VERSION")


def require_npu(core: ov.Core, *, emulated: bool) -> None:
    """Raise RuntimeError, with the devices that there are, when OpenVINO sees no NPU and none is emulated."""
    if not emulated and NPU not in core.available_devices:
        raise RuntimeError(
            f"OpenVINO sees no NPU on this machine, only {', '.join(core.available_devices)}; "
            "check driver, firmware and the render group, or set NPU_NODE_NPU_EMULATION=1"
        )


def busy_meter(counter: str | None, *, stand_in: bool) -> BusyMeter:
    """The meter over the kernel's counter file or the stand-in for it. Raises OSError when the stand-in is gone."""
    path = Path(counter or "/nonexistent")
    return BusyMeter(StandInWriter(path) if stand_in else SysfsCounter(path))


def brief(error: Exception) -> str:
    """The last line of what OpenVINO says, without its source positions."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:200] if lines else type(error).__name__


def read_property(core: ov.Core, name: str) -> str | None:
    """A property of the NPU as text; None where it cannot be read."""
    try:
        return str(core.get_property(NPU, name))
    except RuntimeError:
        return None
