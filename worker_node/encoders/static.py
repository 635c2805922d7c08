"""The engine of an encoder on the NPU: static shapes, compiled ahead in buckets of length.

The NPU runs static shapes only, so the model is compiled once per bucket at load, and each text runs in the smallest
bucket that holds it. What the padding costs is counted. One run at a time, so that the busy counter read around it is
that run's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import openvino as ov

from worker_node.devices.blobs import (
    NPU,
    SMALL,
    ModelBlobs,
    brief,
    describe_npu,
    import_encoder,
    npu_properties,
    require_npu,
)
from worker_node.devices.npu import busy_meter
from worker_node.encoders.jobs import RowJob, RowRunner, StaticEncoderOptions
from worker_node.engines.options import options_in
from worker_node.engines.protocol import (
    DeviceBroken,
    EngineSpec,
    Failed,
    Inbox,
    Loaded,
    NativeCall,
    Outbox,
)
from worker_node.scheduling.texts import BatchLimits


class StaticEncoder(RowRunner):
    """A `Runner` over one compiled model per bucket."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__()
        self._spec = spec
        self._options = options_in(spec, StaticEncoderOptions)
        longest = self._options.npu_buckets[-1]
        rows = self._options.npu_batch_size
        self._limits = BatchLimits(longest * rows, rows, lengths=self._options.npu_buckets)
        self._names: frozenset[str] = frozenset()
        self._requests: dict[int, ov.InferRequest] = {}
        self._too_long: list[int] = []

    @property
    def has_work(self) -> bool:
        return bool(self._too_long) or len(self.queue) > 0

    def submit(self, job: RowJob) -> None:
        if max(job.lengths, default=0) > self._options.npu_buckets[-1]:
            self._too_long.append(job.id)  # the edge lets none through; one must not end the engine for all
        else:
            super().submit(job)

    def load(self) -> Loaded:
        began = time.monotonic()
        options, emulated = self._options, self._spec.emulated
        core = ov.Core()
        require_npu(core, options.plugin_config, emulated=emulated)
        self._meter = busy_meter(options.busy_counter, self._spec.energy_meter(), stand_in=options.stand_in)
        blobs = ModelBlobs(
            self._spec.model_id,
            Path(self._spec.path),
            [_blob(length) for length in options.npu_buckets],
            options.compiled_in(),
            emulated,
        )
        for length, compiled in self._models(core, blobs):
            self._names = frozenset(port.any_name for port in compiled.inputs)
            self._requests[length] = compiled.create_infer_request()
        self._meter.rest()
        name, driver = describe_npu(core, emulated=emulated)
        shapes, imported = len(self._requests), options.blobs is not None
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
        if options.blobs is not None:
            source = Path(options.blobs).expanduser()
            properties = blobs.checked(core, source)
            for length in options.npu_buckets:
                shape = (options.npu_batch_size, length)
                yield length, import_encoder(core, source / _blob(length), properties, shape)
            return

        config = npu_properties(
            emulated=self._spec.emulated, cache_dir=options.cache_dir, plugin_config=options.plugin_config
        )
        for length in options.npu_buckets:
            model = core.read_model(Path(self._spec.path) / "openvino_model.xml")
            model.reshape({port.any_name: [options.npu_batch_size, length] for port in model.inputs})
            if options.export_blobs is None:
                yield length, core.compile_model(model, NPU, config)
                continue
            compiled = core.compile_model(model, NPU, config | SMALL)
            (Path(options.export_blobs) / _blob(length)).write_bytes(compiled.export_model().getbuffer())
            yield length, compiled

        if options.export_blobs is not None:
            blobs.written(core, Path(options.export_blobs))

    def step(self, emit: Outbox, poll: Inbox) -> None:  # noqa: ARG002  (a run is short: the loop polls between)
        now = time.monotonic()
        longest = self._options.npu_buckets[-1]
        for job_id in self._too_long:
            emit(Failed(job_id, "context_length_exceeded", f"a text is longer than this engine's {longest} tokens"))
        self._too_long.clear()
        self.expire(now, emit)
        batch = self.take(self._limits, now)
        if not batch:
            return
        length = self._limits.padded(batch[0].length)
        shape = (self._options.npu_batch_size, length)
        inputs = self.inputs(batch, shape, self._names)

        # Runs follow one another, so each is timed by itself, and a full one tells the speed whether or not texts wait.
        self.throughput.mark_progress(now, saturated=False)
        self.throughput.mark_progress(now, saturated=len(batch) >= self._options.npu_batch_size or len(self.queue) > 0)
        request = self._requests[length]
        tokens = shape[0] * shape[1]
        emit(NativeCall("run", tokens, sorted({w.job_id for w in batch})))
        self._meter.begin()
        try:
            request.infer(inputs)
        except RuntimeError as error:
            raise DeviceBroken(f"the NPU failed in a run: {brief(error)}") from None
        busy = self._meter.end()
        for event in self.finish(batch, request.get_output_tensor(0).data, time.monotonic(), tokens, busy):
            emit(event)

    def close(self) -> None:
        self._requests.clear()


def _blob(length: int) -> str:
    return f"{length}-tokens.blob"
