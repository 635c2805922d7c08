"""Which processes hold the NPU open: whatever they do shows in the one busy counter."""

from __future__ import annotations

from pathlib import Path

ACCEL_DEVICES = Path("/dev/accel")


def npu_users(proc: Path = Path("/proc"), devices: Path = ACCEL_DEVICES) -> list[int]:
    """The ids of all processes that have a device of `devices` open, as far as this user may see them."""
    found = []
    for process in proc.iterdir():
        if not process.name.isdigit():
            continue
        try:
            targets = [link.readlink() for link in (process / "fd").iterdir()]
        except OSError:
            continue  # it has ended, or is somebody else's
        if any(target.is_relative_to(devices) for target in targets):
            found.append(int(process.name))
    return sorted(found)
