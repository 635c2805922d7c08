"""The engine of an encoder on CPU and GPU.

Texts of one length, of any requests, run together, on every stream of the device; no run waits for more texts."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import openvino as ov

from worker_node.core.types import Device
from worker_node.devices.memory import usable_cores
from worker_node.encoders.jobs import DynamicEncoderOptions
from worker_node.encoders.runs import OverlappingRunner, Slot
from worker_node.engines.options import options_in
from worker_node.engines.protocol import EngineSpec, Loaded
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


class DynamicEncoder(OverlappingRunner):
    """A `Runner` over one compiled encoder (CPU or GPU, dynamic shapes)."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._options = options_in(spec, DynamicEncoderOptions)
        self._on_cpu = spec.device is Device.CPU
        limits = BatchLimits(
            max_tokens=self._options.max_batch_tokens or (CPU_BATCH_TOKENS if self._on_cpu else _GPU_BATCH_TOKENS),
            max_rows=self._options.max_batch_rows,
            longest_text=self._options.context_limit,
        )
        super().__init__(spec, limits=limits)
        self._idle: list[Slot] = []
        # Of the second copy, where there is one.
        self._idle_alone: list[Slot] = []

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
        for _ in range(running + 1):
            self.new_slot(merged.create_infer_request, self._idle)
        weights = Path(self._spec.path) / "openvino_model.bin"
        if self._on_cpu and running > 1 and weights.stat().st_size <= _SECOND_COPY_BYTES:
            # A stream has its share of the cores: best for many texts, slow for one.
            alone = self._compile(core, {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": "1"})
            self.new_slot(alone.create_infer_request, self._idle_alone)
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

    def _has_room(self) -> bool:
        return bool(self._idle)

    def _next_run(self, now: float) -> tuple[Slot, list[Waiting]]:
        if self._idle_alone and len(self.queue) == 1 and not self._active:
            return self._idle_alone[0], self.take(now)
        return self._idle[-1], self.take(now, free_slots=len(self._idle) - 1)
