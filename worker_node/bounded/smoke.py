"""The proof end to end: counter readable, read, exactly one bounded generation, read, verdict, on record."""

from __future__ import annotations

import asyncio
import os
import platform
import time
from dataclasses import dataclass
from typing import Any

from worker_node.bounded.service import JobService
from worker_node.core.errors import EngineUnavailable
from worker_node.devices.npu import npu_users
from worker_node.jobs.bounds import JobRequest

# How long the counter is watched while nothing of ours runs: whatever moves it then is somebody else's.
_IDLE_WATCH_S = 0.3


@dataclass(frozen=True, slots=True)
class SmokeRecord:
    """`passed`, and the facts to paste into a review; neither the prompt nor what was generated is among them."""

    passed: bool
    facts: dict[str, Any]


async def smoke(service: JobService, request: JobRequest) -> SmokeRecord:
    """Run the proof. Raises NodeError when nothing could be generated, EngineUnavailable without a readable counter."""
    counter = service.busy_time()
    if counter.value is None:
        raise EngineUnavailable(f"the NPU's busy counter cannot be read ({counter.reason}); npu-node doctor tells more")
    await service.ready()
    warnings = await _others(service)
    result = await service.run(request)
    payload = result.payload
    if payload.get("npu_busy_exclusive") is False:
        warnings.append("the counter moved by more than this generation can have caused")
    proof = service.proof()
    facts = {
        "verdict": "pass" if result.error is None else "fail",
        "reason": result.error or f"the busy counter moved by {payload['npu_busy_delta_us']} us",
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "model": payload["model"],
        "model_path": str(service.choice.path),
        "device": payload["device"],
        "device_name": proof.device_name if proof else None,
        "emulated": service.npu.emulated,
        "openvino_genai": proof.runtime if proof else None,
        "driver": proof.driver if proof else None,
        "kernel": platform.release(),
        "prompt_characters": len(request.text),
        "max_new_tokens": request.max_new_tokens,
        "output_characters": len(payload["text"] or ""),
        "load_ms": payload["timing_ms"]["initial_load"],
        "generate_ms": payload["timing_ms"]["generate"],
        "npu_busy_before_us": payload["npu_busy_before_us"],
        "npu_busy_after_us": payload["npu_busy_after_us"],
        "npu_busy_delta_us": payload["npu_busy_delta_us"],
        "warnings": [f"the delta is not exclusive: {warning}" for warning in warnings],
    }
    return SmokeRecord(result.error is None, facts)


async def _others(service: JobService) -> list[str]:
    """What shows that others use the NPU, while our engine rests."""
    before = service.busy_time().value
    await asyncio.sleep(_IDLE_WATCH_S)
    after = service.busy_time().value
    warnings = []
    if before is not None and after is not None and after != before:
        warnings.append("the counter moves while nothing of this test runs")
    ours = {os.getpid(), service.engine_pid()}
    if others := [pid for pid in npu_users() if pid not in ours]:
        warnings.append(f"other processes hold the NPU open: {', '.join(map(str, others))}")
    return warnings
