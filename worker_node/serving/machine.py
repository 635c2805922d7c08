"""The machine that models are placed on: its settings, its devices, and what their engines share."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from worker_node.core.types import Device
from worker_node.devices.npu import NpuSource
from worker_node.devices.probe import Probe
from worker_node.engines.cpu_share import CpuTurns
from worker_node.engines.process import LoadingSlots
from worker_node.settings import NodeSettings


@dataclass(frozen=True, slots=True)
class Machine:
    """The node's settings and the devices that it found.

    Engines write what they compile to `export_blobs`, for `npu-node compile`.
    """

    settings: NodeSettings
    probe: Probe
    npu: NpuSource
    slots: LoadingSlots = field(default_factory=LoadingSlots)
    export_blobs: Path | None = None
    turns: CpuTurns = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "turns", CpuTurns(self.settings.share_beside_chats))

    def devices(self) -> tuple[Device, ...]:
        """The devices that a model may be placed on, in order of preference."""
        return tuple(device for device in Device if self.emulates(device) or self.probe.find(device) is not None)

    def emulates(self, device: Device) -> bool:
        """Whether the device is an emulated NPU."""
        return self.npu.emulated and device is Device.NPU
