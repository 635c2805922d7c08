"""Which accelerator of this machine is the NPU: found by its driver, since numbers follow the order of loading."""

from __future__ import annotations

import re
from pathlib import Path

ACCEL_CLASS = Path("/sys/class/accel")
NPU_DRIVER = "intel_vpu"
_NAME = re.compile(r"accel([0-9]+)")


def find_npu(accelerators: Path = ACCEL_CLASS) -> Path:
    """The sysfs directory of the first accelerator that the NPU's driver runs.

    Without one, the path that the only accelerator of a machine has; it does not exist, or holds no counters.
    """
    numbered = [(int(match[1]), path) for path in _entries(accelerators) if (match := _NAME.fullmatch(path.name))]
    for _, path in sorted(numbered):
        try:
            driver = (path / "device" / "driver").readlink().name
        except OSError:
            continue  # a device that no driver has taken
        if driver == NPU_DRIVER:
            return path / "device"
    return accelerators / "accel0" / "device"


def _entries(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except OSError:
        return []
