"""Limits of a placement that follow from its engine: for admission control, and for the growth of its memory."""

from __future__ import annotations

from dataclasses import replace

from worker_node.core.types import Device
from worker_node.devices.memory import machine_memory
from worker_node.engines.restart import GrowthLimits, default_growth
from worker_node.scheduling.admission import AdmissionLimits
from worker_node.serving.task import EnginePlan, served_task


def admission_limits(plan: EnginePlan, max_outstanding: int | None) -> AdmissionLimits:
    """Return the limits of a placement, in units of its task; `max_outstanding` None is the default of its engine."""
    limits = served_task(plan.options.task).admission(plan.options)
    return limits if max_outstanding is None else replace(limits, max_outstanding=max_outstanding)


def growth_limits(growth: int | None, device: Device, *, emulated: bool) -> GrowthLimits:
    """Return how far an engine process may grow, in bytes; `growth` None is a share of the machine's memory.

    Two processes run at once only where they use the machine's memory: whether a real NPU or GPU has memory for two
    shows only when the second one fails.
    """
    memory = machine_memory()
    if memory is None:
        return GrowthLimits(growth, beside=False)
    beside = emulated or device is Device.CPU
    return GrowthLimits(growth or default_growth(memory.total), beside=beside, reserve=memory.total // 16)
