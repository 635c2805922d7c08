"""The engine of an encoder on CPU and GPU.

Texts of one length, of any requests, run together, on every stream of the device; no run waits for more texts."""

from __future__ import annotations

import contextlib
import socket
import time
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import openvino as ov

from worker_node.core.types import Busy, Device
from worker_node.devices.memory import usable_cores
from worker_node.encoders.jobs import DynamicEncoderOptions, RowRunner
from worker_node.engines.options import options_in
from worker_node.engines.protocol import EngineSpec, EngineStats, Inbox, Loaded, Outbox, Outcome, OutcomeBatch
from worker_node.scheduling.texts import BatchLimits, Waiting

# Measured (docs/performance.md): on a CPU, larger batches gain nothing and balance worse between streams. A GPU
# wants its batches large (not measured).
CPU_BATCH_TOKENS = 256
_GPU_BATCH_TOKENS = 8192
# Texts of one padded length run together. Measured: in bf16 a batch of 47 tokens a row takes a third longer than one of
# 48; the first run of each shape costs as much again. In f32 more padding than this costs more than batches gain.
_MULTIPLE, _HALF_PRECISION_MULTIPLE = 8, 16
_HALF_PRECISION = frozenset({ov.Type.bf16, ov.Type.f16})
# Not measured: a GPU compiles kernels for each new shape, so it should see few.
_GPU_MULTIPLE = 32
# Measured: on 4 cores, streams of one core each give 1.2 to 1.5 times what the device's own choice, 2 of 2, gives; on 2
# cores they are its choice. More were not measured, and may be of two kinds, which the device knows.
_MOST_CORES_WITH_A_STREAM_EACH = 4
# A text that comes alone is run by a second copy of the model, on all cores, unless the weights are larger than this.
_SECOND_COPY_BYTES = 512 * 2**20


@dataclass(slots=True)
class _Slot:
    """One infer request of the device and what it is running."""

    request: ov.InferRequest
    batch: list[Waiting] = field(default_factory=list)
    tokens: int = 0
    started: float = 0.0


class DynamicEncoder(RowRunner):
    """A `Runner` over one compiled encoder (CPU or GPU, dynamic shapes)."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__()
        self._spec = spec
        self._options = options_in(spec, DynamicEncoderOptions)
        on_cpu = spec.device is Device.CPU
        self._limits = BatchLimits(
            max_tokens=self._options.max_batch_tokens or (CPU_BATCH_TOKENS if on_cpu else _GPU_BATCH_TOKENS),
            max_rows=self._options.max_batch_rows,
            longest_text=self._options.context_limit,
        )
        self._on_cpu = on_cpu
        self._names: frozenset[str] = frozenset()
        self._slots: list[_Slot] = []
        self._idle: list[_Slot] = []
        self._lone: _Slot | None = None
        self._energy = spec.energy_meter()

        # deque.append is atomic, so OpenVINO's threads hand over finished slots without a lock; the socket
        # wakes the engine's loop: on Windows `select` takes nothing else.
        self._finished: deque[_Slot] = deque()
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        self.wake_fd = self._wake.fileno()

    @property
    def has_work(self) -> bool:
        return bool(self._finished) or bool(len(self.queue) and self._idle)

    def stats(self) -> EngineStats:
        now = time.monotonic()
        active = [slot for slot in (*self._slots, self._lone) if slot is not None and slot.batch]
        oldest = min(active, key=lambda slot: slot.started, default=None)
        return msgspec.structs.replace(
            super().stats(),
            oldest_run=None if oldest is None else (oldest.tokens, now - oldest.started),
        )

    def load(self) -> Loaded:
        began = time.monotonic()
        core = ov.Core()
        streams = self._options.streams
        if streams is None:
            cores = usable_cores()
            streams = cores if self._on_cpu and cores <= _MOST_CORES_WITH_A_STREAM_EACH else 0
        chosen = {"NUM_STREAMS": str(streams)} if streams else {}
        merged = self._compile(core, {"PERFORMANCE_HINT": "THROUGHPUT"} | chosen)
        self._names = frozenset(port.any_name for port in merged.inputs)
        self._limits = replace(self._limits, multiple=self._length_multiple(merged))
        running = int(merged.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS"))

        # One more than can run, so that the device has its next batch while the last one's vectors are given out.
        self._slots = [self._slot(merged) for _ in range(running + 1)]
        self._idle = list(self._slots)
        weights = Path(self._spec.path) / "openvino_model.bin"
        if self._on_cpu and running > 1 and weights.stat().st_size <= _SECOND_COPY_BYTES:
            # A stream has its share of the cores: best for many texts, slow for one.
            self._lone = self._slot(self._compile(core, {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": "1"}))
        device = self._spec.device.value
        return Loaded(
            seconds=time.monotonic() - began,
            device_name=str(core.get_property(device, "FULL_DEVICE_NAME")),
            runtime=ov.get_version(),
        )

    def _compile(self, core: ov.Core, config: dict[str, Any]) -> ov.CompiledModel:
        if self._options.precision:
            config["INFERENCE_PRECISION_HINT"] = self._options.precision
        if self._options.cache_dir:
            config["CACHE_DIR"] = self._options.cache_dir
        model = Path(self._spec.path) / "openvino_model.xml"
        return core.compile_model(model, self._spec.device.value, config | self._options.plugin_config)

    def _length_multiple(self, compiled: ov.CompiledModel) -> int:
        if self._options.context_limit is None:
            return 1
        if self._options.length_multiple is not None:
            return self._options.length_multiple
        if not self._on_cpu:
            return _GPU_MULTIPLE
        halves = compiled.get_property("INFERENCE_PRECISION_HINT") in _HALF_PRECISION
        return _HALF_PRECISION_MULTIPLE if halves else _MULTIPLE

    def _slot(self, compiled: ov.CompiledModel) -> _Slot:
        slot = _Slot(compiled.create_infer_request())
        slot.request.set_callback(self._on_finished, slot)
        return slot

    def _on_finished(self, slot: _Slot) -> None:
        # Runs in a thread of OpenVINO's, where an exception would end the process: it only takes notes.
        self._finished.append(slot)
        with contextlib.suppress(BlockingIOError):  # full: it wakes anyway
            self._waker.send(b"1")

    def step(self, emit: Outbox, poll: Inbox) -> None:  # noqa: ARG002  (a batch never blocks this loop)
        self._collect(emit)
        now = time.monotonic()
        self.expire(now, emit)
        if self._lone and len(self.queue) == 1 and len(self._idle) == len(self._slots) and not self._lone.batch:
            self._start(self._lone, self.take(self._limits, now))
        while self._idle and len(self.queue):
            batch = self.take(self._limits, now, free_slots=len(self._idle) - 1)
            self._start(self._idle.pop(), batch)
        self.throughput.mark_progress(now, saturated=len(self.queue) > 0)

    def _start(self, slot: _Slot, batch: list[Waiting]) -> None:
        shape = (len(batch), self._limits.padded(batch[0].length))
        slot.batch, slot.tokens = batch, shape[0] * shape[1]
        for name, values in self.inputs(batch, shape, self._names).items():
            slot.request.set_tensor(name, ov.Tensor(values))
        self._energy.begin(id(slot))
        slot.started = time.monotonic()
        slot.request.start_async()

    def _collect(self, emit: Outbox) -> None:
        try:
            self._wake.recv(4096)
        except BlockingIOError:
            return
        outcomes: list[Outcome] = []
        while self._finished:
            slot = self._finished.popleft()
            slot.request.wait()
            output = slot.request.get_output_tensor(0).data
            busy = Busy(energy=self._energy.end(id(slot)))
            outcomes += self.finish(slot.batch, output, time.monotonic(), slot.tokens, busy)
            slot.batch = []
            if slot is not self._lone:
                self._idle.append(slot)
        if outcomes:
            emit(outcomes[0] if len(outcomes) == 1 else OutcomeBatch(outcomes))

    def close(self) -> None:
        for slot in (*self._slots, self._lone):
            if slot is not None:
                slot.request.wait()
        self._wake.close()
        self._waker.close()
