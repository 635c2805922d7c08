"""Which processes hold the NPU open: whatever they do shows in the one busy counter."""

from __future__ import annotations

from pathlib import Path

from worker_node.devices.accel import find_npu

ACCEL_DEVICES = Path("/dev/accel")


def npu_users(proc: Path = Path("/proc"), device: Path | None = None) -> list[int]:
    """The ids of all processes that have the device (default: the NPU) open, as far as this user may see them."""
    device = device or ACCEL_DEVICES / find_npu().parent.name
    found = []
    for process in proc.iterdir():
        if not process.name.isdigit():
            continue
        try:
            targets = [link.readlink() for link in (process / "fd").iterdir()]
        except OSError:
            continue  # it has ended, or is somebody else's
        if device in targets:
            found.append(int(process.name))
    return sorted(found)
