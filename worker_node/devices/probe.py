"""What OpenVINO sees of this machine's devices.

Asking loads the device plugins, whose native code may crash or hang on a sick driver, so it is done in a process of
its own: `python -m worker_node.devices.probe` prints JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from worker_node.core.environment import native_environment

PROBE_TIMEOUT_S = 60.0

# Facts worth showing; each device has those that it has.
_PROPERTIES = (
    "FULL_DEVICE_NAME",
    "DEVICE_ARCHITECTURE",
    "OPTIMIZATION_CAPABILITIES",
    "DEVICE_PCI_INFO",
    "NPU_DRIVER_VERSION",
    "NPU_COMPILER_VERSION",
    "NPU_DEVICE_TOTAL_MEM_SIZE",
    "NPU_DEVICE_ALLOC_MEM_SIZE",
    "GPU_DEVICE_TOTAL_MEM_SIZE",
)


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A device that OpenVINO lists. A property that could not be read is None, with its reason in `unreadable`."""

    name: str
    properties: dict[str, str | None] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Probe:
    """The devices found, OpenVINO's version, and what went wrong if the probe itself did."""

    devices: tuple[DeviceInfo, ...]
    openvino: str | None
    error: str | None = None

    def find(self, name: str) -> DeviceInfo | None:
        """The device of that name (`GPU` also finds `GPU.0`)."""
        return next((d for d in self.devices if d.name.split(".")[0] == name), None)

    def properties(self, name: str) -> Mapping[str, str | None]:
        """What is known of the device of that name; nothing where there is none."""
        found = self.find(name)
        return {} if found is None else found.properties


async def probe() -> Probe:
    """Ask a child process what OpenVINO sees; never raises, never takes more than PROBE_TIMEOUT_S."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        __name__,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=native_environment(),
        start_new_session=True,  # Ctrl-C is for the node
    )
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            output, _ = await process.communicate()
    except TimeoutError:
        return Probe((), None, f"OpenVINO did not list its devices within {PROBE_TIMEOUT_S:.0f} s")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        return Probe((), None, f"listing the devices ended with status {process.returncode}")
    data = json.loads(output)
    return Probe(tuple(DeviceInfo(**device) for device in data["devices"]), data["openvino"])


def list_devices() -> Probe:
    import openvino as ov  # noqa: PLC0415  (only the probe's own process may load it here)

    core = ov.Core()
    devices = []
    for name in core.available_devices:
        known = set(core.get_property(name, "SUPPORTED_PROPERTIES"))
        info = DeviceInfo(name)
        for key in _PROPERTIES:
            if key not in known:
                continue
            try:
                info.properties[key] = str(core.get_property(name, key))
            except RuntimeError as error:
                info.properties[key] = None
                info.unreadable[key] = str(error).strip().splitlines()[-1][:200]
        devices.append(info)
    return Probe(tuple(devices), ov.get_version())


if __name__ == "__main__":
    print(json.dumps(asdict(list_devices())))
