"""What passports say of placements: which may be used, and how far."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from worker_node.core.types import Device
from worker_node.devices.probe import Probe
from worker_node.models.directory import InstalledModel, content_hash
from worker_node.models.npu_rules import problem_on_npu
from worker_node.models.passports import NOT_CERTIFIED, Identity, PassportStore, Standing, standing
from worker_node.settings import ModelSettings, NodeSettings


def passport_store(settings: NodeSettings) -> PassportStore:
    """That of the settings."""
    directory = settings.passports or settings.model_store.expanduser().parent / "passports"
    return PassportStore(directory, settings.trusted_keys)


def identity_of(
    installed: InstalledModel, wanted: ModelSettings, device: Device, probe: Probe, settings: NodeSettings
) -> Identity:
    """What a passport for the model on the device is bound to. Reads all of the model's weights, once in a process."""
    emulated = device is Device.NPU and settings.npu_emulation
    info = probe.find("CPU" if emulated else device.value)
    properties = info.properties if info is not None else {}
    place = next((place for place in wanted.placements or () if place.device is device), None)
    given: list[Any] = [dict(wanted.options), {} if place is None else dict(place.plugin_config or {})]
    named = properties.get("DEVICE_ARCHITECTURE") if device is Device.NPU else properties.get("FULL_DEVICE_NAME")
    return Identity(
        model=installed.id,
        model_hash=content_hash(installed.path),
        device=device.value,
        architecture="emulated" if emulated else named or "unknown",
        driver="" if emulated else properties.get("NPU_DRIVER_VERSION") or "",
        compiler="" if emulated else properties.get("NPU_COMPILER_VERSION") or "",
        openvino=probe.openvino or "unknown",
        settings_hash=hashlib.sha256(json.dumps(given, sort_keys=True, default=str).encode()).hexdigest(),
        emulated=emulated,
    )


def standing_of(
    installed: InstalledModel, wanted: ModelSettings, device: Device, probe: Probe, settings: NodeSettings
) -> Standing:
    """What the passports say of the model on the device."""
    store = passport_store(settings)
    found = store.of(installed.id, device.value)
    if not found:
        return NOT_CERTIFIED
    return standing(found, identity_of(installed, wanted, device, probe, settings))


def known_problem(installed: InstalledModel, wanted: ModelSettings, device: Device, probe: Probe) -> str | None:
    """What others report of the model on a real device like this one; None if nothing, or if the settings allow it."""
    if device is not Device.NPU or wanted.allow_known_bad:
        return None
    info = probe.find(device.value)
    known = {} if info is None else info.properties
    return problem_on_npu(installed, known.get("DEVICE_ARCHITECTURE") or "unknown", known.get("NPU_DRIVER_VERSION"))


def refusal(found: Standing, *, required: bool) -> str | None:
    """Why a placement is not used, or None. A failure that has expired is no reason."""
    if found.state == "failed":
        return f"its certification {found.reason}"
    if required and found.state not in {"certified", "limited"}:
        return f"require_certified is set, and it is {found.state} ({found.reason}); run: npu-node certify"
    if required and found.passport is not None and found.passport.emulated:
        return "require_certified is set, and its passport is of an emulated NPU"
    return None
