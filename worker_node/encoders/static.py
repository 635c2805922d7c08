"""The engine of an encoder on the NPU: static shapes, compiled ahead in buckets of length.

The NPU runs static shapes only, so the model is compiled once per bucket at load, and each text runs in the smallest
bucket that holds it. What the padding costs is counted. The device is given several runs at once, so that it need not
wait for this process between two; what it was busy meanwhile is divided among them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import openvino as ov

from worker_node.devices.blobs import (
    SMALL,
    ModelBlobs,
    brief,
    compile_encoder,
    describe_npu,
    import_encoder,
    npu_properties,
    require_npu,
    requirements_of,
)
from worker_node.devices.npu import OverlappingRuns, busy_meter
from worker_node.encoders.jobs import RowJob, StaticEncoderOptions
from worker_node.encoders.runs import OverlappingRunner, Slot
from worker_node.engines.options import options_in
from worker_node.engines.protocol import EngineSpec, Failed, Inbox, Loaded, Outbox
from worker_node.scheduling.texts import BatchLimits, Waiting

log = logging.getLogger(__name__)

# Of all active runs together: a run of more leaves the device no pause that another could fill, and what each of them
# needs for itself grows with its length.
_ACTIVE_TOKENS = 4096


class StaticEncoder(OverlappingRunner):
    """A `Runner` over one compiled model per bucket. Each run has an infer request, which is created when needed."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._options = options_in(spec, StaticEncoderOptions)
        longest, rows = self._options.npu_buckets[-1], self._options.npu_batch_size
        limits = BatchLimits(longest * rows, rows, lengths=self._options.npu_buckets)
        super().__init__(spec, limits=limits, rows=rows)

        self._compiled: dict[int, ov.CompiledModel] = {}
        self._idle: dict[int, list[Slot]] = {}
        self._at_once = 1
        self._too_long: list[int] = []

    @property
    def has_work(self) -> bool:
        return bool(self._too_long) or super().has_work

    def submit(self, job: RowJob) -> None:
        if max(job.lengths, default=0) > self._options.npu_buckets[-1]:
            self._too_long.append(job.id)  # the edge lets none through; one must not end the engine for all
        else:
            super().submit(job)

    def load(self) -> Loaded:
        began = time.monotonic()
        options, emulated = self._options, self._spec.emulated
        core = ov.Core()
        require_npu(core, options.compiler_config, emulated=emulated)
        meter = busy_meter(options.busy_counter, self._spec.energy_meter(), stand_in=options.stand_in)
        self._meter = OverlappingRuns(meter)

        blobs = ModelBlobs(
            self._spec.model_id,
            Path(self._spec.path),
            [_blob(length) for length in options.npu_buckets],
            options.compiled_in(),
            emulated,
            platform=options.platform,
        )

        for length, compiled in self._models(core, blobs):
            self._compiled[length] = compiled
            if options.platform is not None:
                continue  # no device is here to run it
            self._names = frozenset(port.any_name for port in compiled.inputs)
            self.new_slot(compiled.create_infer_request, self._idle.setdefault(length, []))
        recommended = int(compiled.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS"))
        self._at_once = max(1, options.infer_requests or recommended)
        meter.rest()

        name, driver = describe_npu(core, emulated=emulated)
        shapes, imported = len(self._compiled), options.blobs is not None
        return Loaded(
            time.monotonic() - began,
            name,
            ov.get_version(),
            driver,
            compiled=0 if imported else shapes,
            imported=shapes if imported else 0,
        )

    def _models(self, core: ov.Core, blobs: ModelBlobs) -> Iterator[tuple[int, ov.CompiledModel]]:
        """Each length with what is compiled for it, or was ahead of time. Raises BlobRejected."""
        options = self._options
        # Without it the plugin recommends one run at a time.
        usual = "LATENCY" if options.infer_requests == 1 else "THROUGHPUT"
        hint = {"PERFORMANCE_HINT": options.plugin_config.get("PERFORMANCE_HINT", usual)}

        if options.blobs is not None:
            source = Path(options.blobs).expanduser()
            properties = hint | blobs.checked(core, source)
            for length in options.npu_buckets:
                shape = (options.npu_batch_size, length)
                yield length, import_encoder(core, source / _blob(length), properties, shape)
            return

        config = npu_properties(
            emulated=self._spec.emulated, cache_dir=options.cache_dir, plugin_config=options.compiler_config, **hint
        )
        if options.export_blobs is not None:
            config |= SMALL
        requirements: dict[str, str] = {}
        for length in options.npu_buckets:
            model = core.read_model(Path(self._spec.path) / "openvino_model.xml")
            model.reshape({port.any_name: [options.npu_batch_size, length] for port in model.inputs})
            compiled = compile_encoder(core, model, config, emulated=self._spec.emulated)
            if options.export_blobs is not None:
                (Path(options.export_blobs) / _blob(length)).write_bytes(compiled.export_model().getbuffer())
                if (needs := requirements_of(compiled)) is not None:
                    requirements[_blob(length)] = needs
            yield length, compiled

        if options.export_blobs is not None:
            blobs.written(core, Path(options.export_blobs), requirements)

    def step(self, emit: Outbox, poll: Inbox) -> None:
        longest = self._options.npu_buckets[-1]
        for job_id in self._too_long:
            emit(Failed(job_id, "context_length_exceeded", f"a text is longer than this engine's {longest} tokens"))
        self._too_long.clear()
        super().step(emit, poll)

    def _has_room(self) -> bool:
        if not self._active:
            return True
        tokens = self._options.npu_batch_size * self._limits.padded(self.queue.first(self._limits).length)
        enough = sum(slot.tokens for slot in self._active) + tokens <= _ACTIVE_TOKENS
        return enough and len(self._active) < self._at_once

    def _next_run(self, now: float) -> tuple[Slot, list[Waiting]] | None:
        length = self._limits.padded(self.queue.first(self._limits).length)
        idle = self._idle[length]
        if not idle:
            try:
                self.new_slot(self._compiled[length].create_infer_request, idle)
            except RuntimeError as error:
                self._at_once = len(self._active)
                log.warning("%s: only %d runs at once: %s", self._spec.model_id, self._at_once, brief(error))
                return None
        return idle[-1], self.take(now)

    def _saturated(self) -> bool:
        # A full run that is alone tells the speed, too.
        full = all(len(slot.batch) >= self._options.npu_batch_size for slot in self._active)
        return super()._saturated() or (full and len(self._active) == self._at_once)


def _blob(length: int) -> str:
    return f"{length}-tokens.blob"
