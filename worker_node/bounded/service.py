"""The profile's one model, running a job on it, and the proof that the NPU ran it.

The proof is the NPU's busy counter, read before and after the generation, under the lock of the device.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Container
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from worker_node.bounded.jobs import JOBS, JobRequest, excerpt, json_object, make_request
from worker_node.bounded.settings import PROMPT_TOKENS, BoundedSettings, DeviceLock, bounded_model
from worker_node.core.errors import ConfigurationError, ContextLengthExceeded, EngineUnavailable, ModelNotFound
from worker_node.core.types import Device, ModelKind, RequestContext
from worker_node.devices.npu import npu_users
from worker_node.engines.process import Canary
from worker_node.engines.protocol import EngineState, EngineStatus, JobEngine
from worker_node.manager.placement import Placement
from worker_node.models.catalog import Catalog
from worker_node.models.directory import WEIGHTS_FILE, InstalledModel, peek_config, read_directory
from worker_node.models.downloads import file_sha256
from worker_node.models.store import ModelStore
from worker_node.node import Node
from worker_node.serving.build import Machine, build_model, known_problem
from worker_node.tasks.generate.blocks import Finished
from worker_node.tasks.generate.building import GenerationModel
from worker_node.tasks.generate.messages import Sampling
from worker_node.tasks.generate.request import GenerationRequest
from worker_node.tasks.generate.service import generate

log = logging.getLogger(__name__)

REFERENCE_MODEL = "qwen2.5-1.5b-instruct"
PUBLISHED_NAME = "OpenVINO/Qwen2.5-1.5B-Instruct-int4-ov"
SMALL_MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True)
class BoundedResult:
    """`payload` is the object that HTTP and the command line answer with; `error` says why it does not count."""

    payload: dict[str, Any] = field(repr=False)
    error: str | None


class JobService:
    """Runs jobs on the profile's one model. Times are seconds inside and milliseconds in payloads."""

    def __init__(self, node: Node, settings: BoundedSettings, choice: Choice, lock: DeviceLock) -> None:
        self.choice = choice
        self.npu = node.npu
        self.cache_dir = str(settings.cache.expanduser())
        self._services = node.services
        self._lock = lock
        self._timeout_s = node.settings.request_timeout_s
        self._load_timeout_s = node.settings.load_timeout_s

    @property
    def model(self) -> GenerationModel:
        """The model. Raises EngineUnavailable, saying what is missing, where there is none."""
        models = self._services.manager.models
        if not models or not isinstance(models[0], GenerationModel):
            raise EngineUnavailable(f"the model is missing: {self.choice.problem}")
        return models[0]

    @property
    def _placement(self) -> Placement:
        return self.model.placements[0]

    @property
    def model_id(self) -> str:
        """The published name where the weights are known, else the model's own, or its directory's."""
        if self.choice.identity is Identity.PUBLISHED:
            return PUBLISHED_NAME
        return self.choice.installed.id if self.choice.installed else self.choice.path.name

    def problem(self) -> str | None:
        """Why no job can succeed now and loading will not change that; None otherwise."""
        if not self._services.manager.models:
            return self.choice.problem
        placement, busy = self._placement, self.npu.busy_time()
        if placement.state.down or placement.refusal is not None:
            return placement.reason
        if busy.value is None:
            return f"the NPU's busy counter cannot be read ({busy.reason}), so no job can be proven"
        return self._lock.problem()

    @property
    def loaded(self) -> bool:
        return bool(self._services.manager.models) and self._placement.state is EngineState.READY

    @property
    def initial_load_ms(self) -> float | None:
        loaded = self.engine.loaded if self._services.manager.models else None
        return None if loaded is None else _ms(loaded.seconds)

    def cache_exists(self) -> bool:
        """Whether anything compiled is kept there, so that loading is quick."""
        name = "" if self.choice.installed is None else self.choice.installed.id
        return any(path.suffix == ".blob" for path in Path(self.cache_dir).glob(f"{name or '-'}/*/*"))

    @property
    def engine(self) -> EngineStatus:
        return self._placement.engine.status

    def label(self) -> dict[str, bool]:
        """What every answer says of an emulated NPU."""
        return {"emulated": True} if self.npu.emulated else {}

    async def ready(self) -> None:
        """Wait, as long as a cold compile may take, until the model is loaded. Raises EngineUnavailable when it is not,
        InsufficientMemory, DeadlineExceeded.
        """
        # The placement's word, not the engine's: that one may not have had its turn to be loaded yet.
        until = time.monotonic() + self._load_timeout_s
        await self._placement.settled(until)
        status = self.engine
        if self._placement.state is not EngineState.READY:
            raise EngineUnavailable(f"{self.model_id} on NPU: {status.reason}", retry_after=status.retry_after)

    async def run(self, request: JobRequest) -> BoundedResult:
        """Run a job. The result has an `error`, whatever was generated, unless the counter moved.

        Raises EngineUnavailable, DeviceUnavailable or DeadlineExceeded when nothing could be generated.
        """
        began = time.monotonic()
        was_loaded = self.loaded
        await self.ready()
        load_s = 0.0 if was_loaded else time.monotonic() - began
        deadline = time.monotonic() + self._timeout_s
        async with self._lock.held():
            before = self.npu.busy_time()
            started = time.monotonic()
            extra: dict[str, Any] = {}
            text = shaped = None
            # The second time not greedily: that would be the same answer again.
            for temperature in (0.0, 0.7):
                if before.value is not None and not shaped:
                    text, extra = await self._generate(request, began, deadline, temperature)
                    shaped = request.job.shape(text)
            generate_s = time.monotonic() - started
            after = self.npu.busy_time() if before.value is not None else before

        delta = None if before.value is None or after.value is None else after.value - before.value
        payload: dict[str, Any] = {
            "model": self.model_id,
            "device": Device.NPU.value,
            "job": request.job.name,
            "text": shaped,
            "json": None if request.job.form is None or text is None else json_object(text),
            "timing_ms": {
                "load": _ms(load_s),
                "initial_load": self.initial_load_ms,
                "generate": _ms(generate_s),
                "total": _ms(time.monotonic() - began),
            },
            "npu_busy_delta_us": delta,
            "npu_busy_before_us": before.value,
            "npu_busy_after_us": after.value,
            "cache_dir": self.cache_dir,
        }

        error = None if shaped else "the model gave no usable text; try again with another input or more tokens"
        if before.value is None:
            error = (
                f"refused: the NPU's busy counter cannot be read ({before.reason}), so nothing would prove that it ran"
            )
        elif delta is None:
            error = (
                f"the NPU's busy counter could not be read after the generation ({after.reason}); nothing proves it ran"
            )
        elif delta <= 0:
            what = "did not move" if delta == 0 else "went backwards"
            error = f"the NPU's busy counter {what} during the generation: the NPU is not proven to have run it"
        return BoundedResult(payload | extra | self.label(), error)

    async def _generate(
        self, request: JobRequest, began: float, deadline: float, temperature: float
    ) -> tuple[str, dict[str, Any]]:
        job, placement = request.job, self._placement
        limit = min(placement.prompt_limit, placement.total_limit - request.max_new_tokens)
        tokenizer = self.model.tokenizer

        def count(part: str) -> int:
            """The tokens of the whole prompt for an input."""
            try:
                return len(tokenizer.encode_chat(job.messages(part)))
            except ContextLengthExceeded:
                return sys.maxsize

        text, kept = fit(request.text, count, limit)
        extra: dict[str, Any] = {} if kept == len(request.text) else {"input_truncated": {"kept_characters": kept}}
        generation = GenerationRequest(
            RequestContext(
                "job",
                began,
                deadline,
                ends=deadline,
                require_device=Device.NPU,
                own_proof=True,
                # An engine that starts again waits for the lock, which this job holds.
                restart_wait_s=0.0,
            ),
            job.messages(text),
            Sampling(
                max_new_tokens=request.max_new_tokens,
                repetition_penalty=job.repetition_penalty,
                temperature=temperature,
            ),
            grammar=job.grammar(request.max_new_tokens),
        )
        answer = ""
        async with generate(self._services, generation, stream=False) as run:
            async for _, [event], _ in run.events:
                if isinstance(event, Finished):
                    answer = event.text()
                    if event.busy.shared:
                        extra["npu_busy_exclusive"] = False
        return answer, extra


def fit(text: str, count: Callable[[str], int], limit: int) -> tuple[str, int]:
    """Return the text, or the longest excerpt of it that has at most `limit` tokens, and how many characters are kept.

    `count` gives the tokens of the whole prompt for a text, and grows with it by and large: the excerpt found fits, and
    a slightly longer one might.
    """
    if count(text) <= limit:
        return text, len(text)
    low, high = 0, len(text) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if count(excerpt(text, middle)) <= limit:
            low = middle
        else:
            high = middle - 1
    return excerpt(text, low), low


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 1)


class Identity(StrEnum):
    """What a model is beside the reference model: by its content, whatever its directory is called."""

    PUBLISHED = "the published reference model"
    COMPATIBLE = "compatible with the reference model, weights unknown"
    OTHER = "not the reference model"


def identify(installed: InstalledModel, weights: Container[str] = ()) -> Identity:
    """Compare the model with the catalog's reference. `weights` are further sha256 of its weights.

    Reads the file of weights where the architecture is the same: about a second for each gigabyte.
    """
    reference = Catalog.load().find(REFERENCE_MODEL)
    if reference is None or not reference.describes(peek_config(installed.path / "config.json")):
        return Identity.OTHER
    found = file_sha256(installed.path / WEIGHTS_FILE)
    # What was pulled was compared with the hub's own hashes when it arrived.
    pulled = installed.source_sha256.values() if installed.source == str(reference.source) else ()
    known = found in reference.weights or found in weights or found in pulled
    return Identity.PUBLISHED if known else Identity.COMPATIBLE


@dataclass(frozen=True, slots=True)
class Choice:
    """The model directory, why it is this one, and the model in it; None with the `problem` where there is none."""

    path: Path
    why: str
    installed: InstalledModel | None
    problem: str | None = None
    identity: Identity = Identity.OTHER


def choose_model(given: Path | None, store: ModelStore, weights: Container[str] = ()) -> Choice:
    """Return the model of `OV_GENAI_NPU_MODEL`, else the reference model of the store, else its small embedded one."""
    if given is not None:
        return _read(given.expanduser(), "OV_GENAI_NPU_MODEL", weights)
    # By the name of its published directory, which `convert` keeps.
    published = PUBLISHED_NAME.rpartition("/")[2]
    for name, why in ((published, "installed"), (SMALL_MODEL, "the reference model is not installed")):
        try:
            path = store.get(name).path
        except ModelNotFound:
            continue
        except ConfigurationError as error:
            return Choice(store.root / name, why, None, error.message)
        return _read(path, why, weights)
    return Choice(
        store.root / REFERENCE_MODEL,
        "not installed",
        None,
        f"no model is installed: run npu-node pull {REFERENCE_MODEL}, or set OV_GENAI_NPU_MODEL to a model directory",
    )


def reservation(choice: Choice) -> str | None:
    """What to report at start-up when the model is not the one that the jobs were accepted with."""
    if choice.installed is None or choice.identity is Identity.PUBLISHED:
        return None
    if choice.identity is Identity.COMPATIBLE:
        return (
            f"{choice.path} has the architecture of {PUBLISHED_NAME} and weights that are not known: the quality and "
            f"times of the jobs were accepted for the published ones; run npu-node pull {REFERENCE_MODEL}, or add the "
            f"sha256 of {WEIGHTS_FILE} to OV_GENAI_NPU_WEIGHTS"
        )
    return (
        f"{choice.installed.id} is not the reference model {REFERENCE_MODEL}: its answers to the jobs may be worse, or "
        f"slower; run npu-node pull {REFERENCE_MODEL}, with OV_GENAI_NPU_MODEL not set"
    )


def _read(path: Path, why: str, weights: Container[str]) -> Choice:
    if not path.is_dir():
        return Choice(path, why, None, f"{path} is not a directory; set OV_GENAI_NPU_MODEL to a model directory")
    try:
        installed = read_directory(path)
    except ConfigurationError as error:
        return Choice(path, why, None, error.message)
    if installed.kind != ModelKind.GENERATION:
        return Choice(path, why, None, f"{path} holds a model that embeds; the jobs need one that generates text")
    if installed.context_limit < PROMPT_TOKENS:
        problem = (
            f"{path}: the model's context holds {installed.context_limit} tokens, and the jobs need {PROMPT_TOKENS}; "
            "set OV_GENAI_NPU_MODEL to another model directory"
        )
        return Choice(path, why, None, problem)
    identity = identify(installed, weights)
    return Choice(path, f"{why}; {identity}", installed, identity=identity)


def build(
    choice: Choice, machine: Machine, lock: DeviceLock, blobs: Path | None = None, *, examined: bool
) -> list[GenerationModel]:
    """The chosen model on the NPU alone, or nothing where there is none.

    The reference model is never left out for what is known of its weights or family: that is a warning.
    With `examined` the engine is ready only after its known answers, which wait for the lock as every generation does.
    Raises ConfigurationError.
    """
    if choice.installed is None:
        return []
    installed = choice.installed if examined else replace(choice.installed, canary=None)

    def guard(canary: Canary) -> Canary:
        async def locked(engine: JobEngine) -> None:
            async with lock.held():
                await canary(engine)

        return locked

    wanted = bounded_model(installed.id, blobs)
    if choice.identity is not Identity.OTHER and not machine.emulates(Device.NPU):
        # The profile was accepted with this model on NPUs, and proves every generation: rules and reports only warn.
        if (problem := known_problem(installed, wanted, Device.NPU, machine.probe)) is not None:
            log.warning("%s is used on the NPU all the same: %s", installed.id, problem)
        wanted = wanted.model_copy(update={"allow_known_bad": True})
    model = build_model(installed, wanted, machine, guard)
    return [model] if isinstance(model, GenerationModel) else []


# How long the counter is watched while nothing of ours runs: whatever moves it then is somebody else's.
_IDLE_WATCH_S = 0.3


async def smoke(service: JobService, request: JobRequest) -> dict[str, Any]:
    """Run the proof and return the facts to paste into a review, without the prompt and what was generated.

    Raises NodeError when nothing could be generated, EngineUnavailable without a readable counter.
    """
    counter = service.npu.busy_time()
    if counter.value is None:
        raise EngineUnavailable(f"the NPU's busy counter cannot be read ({counter.reason}); run npu-node doctor")
    await service.ready()
    warnings = await _others(service)
    result = await service.run(request)
    payload = result.payload
    if payload.get("npu_busy_exclusive") is False:
        warnings.append("the counter moved by more than this generation can have caused")
    loaded = service.engine.loaded
    return {
        "verdict": "pass" if result.error is None else "fail",
        "reason": result.error or f"the busy counter moved by {payload['npu_busy_delta_us']} us",
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "model": payload["model"],
        "model_path": str(service.choice.path),
        "device": payload["device"],
        "device_name": loaded.device_name if loaded else None,
        "emulated": service.npu.emulated,
        "openvino_genai": loaded.runtime if loaded else None,
        "driver": loaded.driver if loaded else None,
        "kernel": platform.release(),
        "prompt_characters": len(request.text),
        "max_new_tokens": request.max_new_tokens,
        "output_characters": len(payload["text"] or ""),
        "load_ms": payload["timing_ms"]["initial_load"],
        "generate_ms": payload["timing_ms"]["generate"],
        **{name: payload[name] for name in ("npu_busy_before_us", "npu_busy_after_us", "npu_busy_delta_us")},
        "warnings": [f"the delta is not exclusive: {warning}" for warning in warnings],
    }


async def _others(service: JobService) -> list[str]:
    """What shows that others use the NPU, while our engine rests."""
    before = service.npu.busy_time().value
    await asyncio.sleep(_IDLE_WATCH_S)
    after = service.npu.busy_time().value
    warnings = []
    if before is not None and after is not None and after != before:
        warnings.append("the counter moves while nothing of this test runs")
    ours = {os.getpid(), service.engine.pid}
    if others := [pid for pid in npu_users() if pid not in ours]:
        warnings.append(f"other processes hold the NPU open: {', '.join(map(str, others))}")
    return warnings


# How long the jobs take, cold and warm, against what is accepted of the reference model.

COLD_LIMIT_S = 15.0
NO_GO_P95_S = 15.0
WARM_LIMIT_S = {"title": 5.0, "notification": 5.0, "summary": 10.0, "memory_candidate": 10.0}

SAMPLE = (
    "Build 4812 of the payments service failed at 03:12 because the database migration timed out after 30 minutes. "
    "The on-call engineer Dana rolled it back to build 4811 and the queue was empty again at 03:40. Dana prefers to be "
    "paged by phone, not by email. The team decided to run migrations on Sunday mornings from now on."
)


async def measure_jobs(service: JobService, repeat: int) -> dict[str, Any]:
    """Run every job `repeat` times after one that pays for loading. Times in seconds. Raises NodeError.

    `accepted` is None where the figures are no evidence: another model, or an emulated NPU.
    """
    cached = service.cache_exists()
    began = time.monotonic()
    first = await service.run(make_request("title", SAMPLE))
    cold_s = time.monotonic() - began

    failures = [first.error] if first.error else []
    jobs: dict[str, Any] = {}
    for name in sorted(JOBS):
        seconds, nulls = [], 0
        for _ in range(repeat):
            result = await service.run(make_request(name, SAMPLE))
            if result.error:
                failures.append(f"{name}: {result.error}")
            seconds.append(result.payload["timing_ms"]["total"] / 1e3)
            nulls += JOBS[name].form is not None and result.payload["json"] is None
        jobs[name] = {
            "p50_s": round(statistics.median(seconds), 2),
            "p95_s": round(float(np.percentile(seconds, 95)), 2),
            "max_s": round(max(seconds), 2),
            "limit_s": WARM_LIMIT_S[name],
            "json_null": nulls,
        }

    problems = list(failures)
    if cold_s > COLD_LIMIT_S:
        problems.append(f"the cold first generation took {cold_s:.1f} s, accepted are {COLD_LIMIT_S:g}")
    for name, figures in jobs.items():
        if figures["p95_s"] > NO_GO_P95_S:
            problems.append(f"no-go: {name} has a p95 of {figures['p95_s']:.1f} s, over {NO_GO_P95_S:g}")
        elif figures["p50_s"] >= figures["limit_s"]:
            problems.append(f"{name} took {figures['p50_s']:.1f} s, accepted is less than {figures['limit_s']:g}")

    evidence = service.model_id == PUBLISHED_NAME and not service.npu.emulated
    return {
        "model": service.model_id,
        "emulated": service.npu.emulated,
        "repeat": repeat,
        "cache_before": cached,
        "load_ms": service.initial_load_ms,
        "cold_first_s": round(cold_s, 2),
        "cold_limit_s": COLD_LIMIT_S,
        "jobs": jobs,
        "failures": failures,
        "problems": problems,
        "evidence": evidence,
        "accepted": not problems if evidence else None,
    }
