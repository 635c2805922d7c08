"""GET /health and its parts: the state of the node and its models, all of it read at the time."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from aiohttp import web

from worker_node import __version__
from worker_node.core.types import Device
from worker_node.devices.npu import EMULATED_NAME
from worker_node.engines.protocol import EngineState
from worker_node.http.access import ACCESS
from worker_node.http.context import NODE
from worker_node.http.replies import Devices, Health, Status, json_response
from worker_node.http.routes import JSON, ApiOperation
from worker_node.manager.placement import ExcludedPlacement, Placement
from worker_node.manager.served import FailedModel, ModelState, ServedModel
from worker_node.node import Node
from worker_node.serving.demanded_faults import read_faults

STATUSES = ("ready", "degraded", "starting", "draining", "failed")
_SERVING = frozenset({"ready", "degraded"})
# An unloaded model is as available as configured: a request that needs it has it loaded.
_AVAILABLE = frozenset({ModelState.READY, ModelState.UNLOADED})
# Clients take no longer texts.
_LONGEST_REASON = 500


def node_status(node: Node) -> str:
    if node.state.draining:
        return "draining"

    states = [model.state() for model in node.manager.models]
    states += [ModelState.FAILED for _ in node.manager.failed]

    if all(state in _AVAILABLE for state in states):
        return "ready"
    if any(state in _AVAILABLE or state is ModelState.DEGRADED for state in states):
        return "degraded"
    return "starting" if ModelState.LOADING in states else "failed"


def status_reason(node: Node) -> str | None:
    """Which models do not serve as configured, and why; None when all do."""
    parts = []
    for model in node.manager.models:
        state = model.state()
        if state not in _AVAILABLE:
            serving = model.serving()
            where = f" on {serving.device}" if serving is not None else ""
            parts.append(f"{model.id} is {state}{where}: {model.placements[0].reason}")

    parts += [f"{model.name} is failed: {model.reason}" for model in node.manager.failed]
    if node.state.draining:
        parts.insert(0, "the node is shutting down")
    return "; ".join(parts) or None


def report(node: Node) -> dict[str, Any]:
    return {
        "status": node_status(node),
        "reason": status_reason(node),
        "version": __version__,
        "faults": [str(fault) for fault in read_faults(node.settings.faults)],
        "uptime_s": round(time.monotonic() - node.state.started, 1),
        "devices": device_list(node),
        "models": [
            *(_model(model, node.manager.names.aliases(model)) for model in node.manager.models),
            *(_failed(model) for model in node.manager.failed),
        ],
        "npu": _npu(node),
    }


async def _health(request: web.Request) -> web.Response:
    body = report(request.app[NODE])
    status = 200 if body["status"] in _SERVING else 503
    if not request.app[ACCESS].authorize(request):
        # Load balancers hold no keys; what runs here, and how, is for key holders.
        body = {name: body[name] for name in ("status", "version")}
    return json_response(body, status)


async def _live(_request: web.Request) -> web.Response:
    return json_response({"status": "live"})


async def _ready(request: web.Request) -> web.Response:
    status = node_status(request.app[NODE])
    return json_response({"status": status}, status=200 if status in _SERVING else 503)


async def _devices(request: web.Request) -> web.Response:
    node = request.app[NODE]
    devices = []
    for device in node.probe.devices:
        properties = {
            name: {"value": value, "reason": device.unreadable.get(name)} for name, value in device.properties.items()
        }
        devices.append({"name": device.name, "properties": properties})
    return json_response(
        {
            "openvino": node.probe.openvino,
            "error": node.probe.error,
            "devices": devices,
            "npu_counters": {"emulated": node.npu.emulated, **asdict(node.npu.read())},
        }
    )


def _npu(node: Node) -> dict[str, Any]:
    """The counters of the NPU; `reasons` names why each null value is null."""
    counters = node.npu.read()
    read = {name: getattr(counters, name) for name in ("busy_time_us", "memory_bytes", "frequency_mhz", "energy_uj")}
    reasons = {name: reading.reason for name, reading in read.items() if reading.value is None}

    busy = counters.busy_time_us
    share = node.state.npu_utilisation.sample(busy.value, time.monotonic())
    if share is None:
        reasons["utilisation"] = busy.reason or "the counter was read only once"
    return {
        "emulated": node.npu.emulated,
        **{name: reading.value for name, reading in read.items()},
        "utilisation": None if share is None else round(share, 4),
        "reasons": reasons,
    }


def device_list(node: Node) -> list[dict[str, Any]]:
    devices: list[dict[str, Any]] = []
    for device in Device:
        emulated = device is Device.NPU and node.npu.emulated
        found = None if emulated else node.probe.find(device)
        properties = {"FULL_DEVICE_NAME": EMULATED_NAME} if emulated else found.properties if found else {}
        devices.append(
            {
                "name": device,
                "available": emulated or found is not None,
                "emulated": emulated,
                "full_name": properties.get("FULL_DEVICE_NAME"),
                "driver": properties.get("NPU_DRIVER_VERSION"),
            }
        )
    return devices


def _model(model: ServedModel, aliases: list[str]) -> dict[str, Any]:
    serving = model.serving()
    shown = serving or model.placements[0]
    status = shown.engine.status
    return {
        "id": model.id,
        "aliases": aliases,
        "kind": model.installed.kind,
        "state": model.state(),
        "reason": model.placements[0].reason,
        "device": serving.device if serving else None,
        "placements": [placement.device for placement in model.placements],
        "engines": [describe_placement(placement) for placement in model.placements],
        "excluded": excluded_placements(model),
        "context_limit": model.installed.context_limit,
        "queue_depth": sum(p.admission.queue_depth for p in model.placements),
        "in_flight": sum(p.admission.outstanding for p in model.placements),
        "ready_in_s": rounded(model.ready_in()),
        "compile": {
            "state": "running" if shown.state is EngineState.STARTING and not shown.queued else "done",
            "seconds": None if status.loaded is None else round(status.loaded.seconds, 2),
        },
        **model.facts(),
    }


def _failed(model: FailedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "aliases": list(model.aliases),
        "kind": model.kind,
        "state": ModelState.FAILED,
        "reason": model.reason,
        "device": None,
        "placements": [],
        "engines": [],
        "excluded": excluded_placements(model),
        "context_limit": None,
        "queue_depth": 0,
        "in_flight": 0,
        "ready_in_s": None,
        "compile": {"state": "done", "seconds": None},
    }


def describe_placement(placement: Placement) -> dict[str, Any]:
    status = placement.engine.status
    canary = None
    if status.loaded is not None and status.proven_at is not None:
        canary = {
            "passed_at": round(status.proven_at, 3),
            "age_s": round(time.time() - status.proven_at, 1),
            "device": status.loaded.device_name,
            "driver": status.loaded.driver,
            "openvino": status.loaded.openvino,
        }
    return {
        "device": placement.device,
        "state": placement.state,
        "reason": placement.reason,
        "emulated": placement.emulated,
        "prompt_limit": placement.prompt_limit,
        "total_limit": placement.total_limit,
        "pid": status.pid,
        "restarts": status.restarts,
        "canary": canary,
        "prewarm": status.prewarm,
        **_certification(placement),
        "notes": placement.notes,
        "faults": placement.faults,
        "options": placement.options,
        "retry_after_s": rounded(status.retry_after),
    }


def _certification(placement: Placement | ExcludedPlacement) -> dict[str, str | int | None]:
    """What the passports say of a placement, why, and up to how many tokens; an emulated NPU has its own passports."""
    standing = placement.standing
    return {
        "certified": standing.state,
        "certified_reason": standing.reason.removeprefix(f"{standing.state} ")[:_LONGEST_REASON],
        "certified_limit": None if standing.passport is None else standing.passport.limits.max_prompt_tokens,
    }


def excluded_placements(model: ServedModel | FailedModel) -> list[dict[str, Any]]:
    return [
        {"device": place.device, "emulated": place.emulated, "reason": place.reason, **_certification(place)}
        for place in model.excluded
    ]


def rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)


OPERATIONS = (
    ApiOperation("get", "/health", _health, "What the node can do now", {JSON: Health}, open=True),
    ApiOperation("get", "/health/live", _live, "Whether the process is up", {JSON: Status}, open=True),
    ApiOperation("get", "/health/ready", _ready, "Whether the node can serve", {JSON: Status}, open=True),
    ApiOperation("get", "/health/devices", _devices, "All that is known of each device", {JSON: Devices}),
)
