"""The engine of an encoder on the NPU: static shapes, compiled ahead in buckets of length.

The NPU runs static shapes only, so the model is compiled once per bucket at load, and each text runs in the smallest
bucket that holds it. What the padding costs is counted. One run at a time, so that the busy counter read around it is
that run's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from enum import Enum, auto
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import Node, Output
from openvino import opset13 as op

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
from worker_node.encoders.jobs import RowJob, RowJobs, RunCost, StaticEncoderOptions
from worker_node.engines.protocol import (
    DeviceBroken,
    EngineSpec,
    EngineStats,
    Failed,
    Inbox,
    Loaded,
    NativeCall,
    Outbox,
    Outcome,
)
from worker_node.scheduling.texts import BatchLimits, PackingLimits, Waiting


class StaticEncoder:
    """A `Runner` over one compiled model per bucket; a task says what it takes and gives."""

    jobs: ClassVar[Any]
    options: ClassVar[type[StaticEncoderOptions]]
    result: ClassVar[type[Outcome]]
    output: ClassVar[str]

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._options = msgspec.convert(spec.options, self.options)
        longest = self._options.npu_buckets[-1]
        self._limits: BatchLimits | PackingLimits = BatchLimits(
            max_tokens=longest * self._options.npu_batch_size, max_rows=self._options.npu_batch_size
        )
        self._jobs = RowJobs(self.result)
        self._too_long: list[int] = []
        self._names: frozenset[str] = frozenset()
        self._requests: dict[int, ov.InferRequest] = {}

    @property
    def has_work(self) -> bool:
        return len(self._jobs.queue) > 0 or bool(self._too_long)

    @property
    def wake_fd(self) -> None:
        return None

    def stats(self) -> EngineStats:
        return self._jobs.stats()

    def load(self) -> Loaded:
        began = time.monotonic()
        options, emulated = self._options, self._spec.emulated
        core = ov.Core()
        require_npu(core, emulated=emulated)
        self._meter = busy_meter(options.busy_counter, stand_in=options.stand_in)
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
            model = self.shaped(core.read_model(Path(self._spec.path) / "openvino_model.xml"), length)
            if options.export_blobs is None:
                yield length, core.compile_model(model, NPU, config)
                continue
            compiled = core.compile_model(model, NPU, config | SMALL)
            (Path(options.export_blobs) / _blob(length)).write_bytes(compiled.export_model().getbuffer())
            yield length, compiled
        if options.export_blobs is not None:
            blobs.written(core, Path(options.export_blobs))

    def shaped(self, model: ov.Model, length: int) -> ov.Model:
        """The model as it is compiled for this length."""
        model.reshape({port.any_name: [self._options.npu_batch_size, length] for port in model.inputs})
        return model

    def submit(self, job: RowJob) -> None:
        if max(job.lengths, default=0) > self._options.npu_buckets[-1]:
            self._too_long.append(job.id)  # the edge lets none through; one must not end the engine for all
        else:
            self._jobs.add(job)

    def cancel(self, job_id: int) -> None:
        self._jobs.cancel(job_id)

    def step(self, emit: Outbox, poll: Inbox) -> None:  # noqa: ARG002  (a run is short: the loop polls between)
        now = time.monotonic()
        longest = self._options.npu_buckets[-1]
        for job_id in self._too_long:
            emit(Failed(job_id, "context_length_exceeded", f"a text is longer than this engine's {longest} tokens"))
        self._too_long.clear()
        for job_id in self._jobs.expire(now):
            emit(Failed(job_id, "deadline_exceeded", "the deadline passed while the request was queued"))
        batch = self._jobs.take(self._limits, now)
        if not batch:
            return
        length = self.length_of(batch)
        shape = (self._options.npu_batch_size, length)
        inputs = self.inputs(batch, shape)
        # Runs follow one another, so each is timed by itself, and a full one tells the speed whether or not texts wait.
        self._jobs.throughput.went_on(now, waiting=False)
        self._jobs.throughput.went_on(
            now, waiting=len(batch) >= self._options.npu_batch_size or len(self._jobs.queue) > 0
        )
        request = self._requests[length]
        emit(NativeCall("run", shape[0] * shape[1], sorted({w.job_id for w in batch})))
        self._meter.begin()
        try:
            request.infer(inputs)
        except RuntimeError as error:
            raise DeviceBroken(f"the NPU failed in a run: {brief(error)}") from None
        busy = self._meter.end()
        cost = RunCost(shape[0] * shape[1], busy.us, busy.shared)
        for event in self._jobs.finish(batch, request.get_tensor(self.output).data, cost, time.monotonic()):
            emit(event)

    def length_of(self, batch: list[Waiting]) -> int:
        """The length that a batch runs in."""
        return bucket_for(max(w.length for w in batch), self._options.npu_buckets)

    def inputs(self, batch: list[Waiting], shape: tuple[int, int]) -> dict[str, npt.NDArray[np.int64]]:
        """The tensors of a run by the names of the model's inputs, each of `shape` (rows, length)."""
        ids, mask = self._jobs.padded(batch, shape)
        return {"input_ids": ids, "attention_mask": mask}

    def close(self) -> None:
        self._requests.clear()


def _blob(length: int) -> str:
    return f"{length}-tokens.blob"


def bucket_for(length: int, buckets: tuple[int, ...]) -> int:
    """The smallest bucket that holds `length` tokens. Raises ValueError when none does."""
    for bucket in buckets:
        if length <= bucket:
            return bucket
    raise ValueError(f"{length} tokens do not fit the largest bucket of {buckets[-1]}")


# Several texts in one row of a static shape: the graph of a sentence encoder that takes them.
#
# A row of one text is padded to the next length that is compiled. In a packed row texts stand one after another: a
# token
# attends to those of its own text only (the mask is block-diagonal), positions begin anew with each text, and each
# has a
# vector of its own.

# The inputs of an encoder whose rows hold one text each.
INPUT_IDS = "input_ids"
ATTENTION_MASK = "attention_mask"
POSITION_IDS = "position_ids"
# The number of the text that a token is of, from 1; padding is of text 0.
SEGMENT_IDS = "segment_ids"

_OTHER_TEXT = -10000.0  # as for padding in `models.conversion.bert`
_MIN_TOKENS = 1e-9


class _Vector(Enum):
    """The token vectors that the vector of a text is made of."""

    MEAN = auto()
    FIRST = auto()
    LAST = auto()


class CannotPack(Exception):
    """The graph is not that of a sentence encoder as this node builds them; the message says what it lacks."""


def packed_encoder(model: ov.Model, length: int, texts: int) -> ov.Model:
    """Return the encoder for rows of `length` tokens of up to so many texts; `model` is used up.

    Inputs `input_ids`, `position_ids` and `segment_ids`, i64 [1, length]; output f32 [texts, dimensions], with row i
    that of segment i + 1, named as that of `model`. Raises CannotPack.
    """
    inputs = {port.any_name: port.get_node() for port in model.inputs}
    if set(inputs) != {INPUT_IDS, ATTENTION_MASK}:
        raise CannotPack(f"its inputs are {', '.join(sorted(inputs))}, not {INPUT_IDS} and {ATTENTION_MASK}")
    ids = inputs[INPUT_IDS]
    positions, segments = _input(POSITION_IDS, length), _input(SEGMENT_IDS, length)
    end, hidden, kind = _end(model)
    _restart_positions(model, positions)
    _keep_texts_apart(model, segments)
    names = model.outputs[0].get_names()
    end.replace_source_output(_pool(hidden, positions, segments, texts, kind).output(0))
    model.outputs[0].set_names(names)
    packed = ov.Model(model.get_results(), [ids, positions, segments], "packed_sentence_encoder")
    # Also where nothing has to change: it has every node work out its shape anew.
    packed.reshape({port.any_name: [1, length] for port in packed.inputs})
    return packed


def _input(name: str, length: int) -> Node:
    port = op.parameter([1, length], np.int64)
    port.set_friendly_name(name)
    port.output(0).set_names({name})
    return port


def _axes(*values: int) -> Node:
    return op.constant(np.array(values, np.int64))


def _of_type(model: ov.Model, kind: str) -> Iterator[Node]:
    return (node for node in model.get_ordered_ops() if node.get_type_name() == kind)


def _restart_positions(model: ov.Model, positions: Node) -> None:
    """Look up the vector of each token's position, where the graph has the first ones in their order."""
    slices = list(_of_type(model, "Slice"))
    if len(slices) != 1:
        raise CannotPack(f"it cuts {len(slices)} tables to the length of a text, not its table of positions alone")
    (readers,) = (list(cut.get_target_inputs()) for cut in slices[0].outputs())
    if [reader.get_node().get_type_name() for reader in readers] != ["Unsqueeze"]:
        raise CannotPack("its positions are not added to every row")
    found = op.gather(slices[0].input_value(0), positions, _axes(0))
    for reader in readers[0].get_node().output(0).get_target_inputs():
        reader.replace_source_output(found.output(0))


def _keep_texts_apart(model: ov.Model, segments: Node) -> None:
    same = op.equal(op.unsqueeze(segments, _axes(1)), op.unsqueeze(segments, _axes(2)))
    other = op.subtract(np.float32(1.0), op.convert(same, "f32"))
    mask = op.unsqueeze(op.multiply(other, np.float32(_OTHER_TEXT)), _axes(1))
    attentions = list(_of_type(model, "ScaledDotProductAttention"))
    if not attentions or any(node.get_input_size() < 4 for node in attentions):
        raise CannotPack("it has no attention with a mask")
    for node in attentions:
        node.input(3).replace_source_output(mask.output(0))


def _end(model: ov.Model) -> tuple[ov.Input, Output, _Vector]:
    """Where the pooled vector goes, the token vectors that it is made of, and how."""
    (result,) = model.get_results()
    end = result.input(0)
    if end.get_source_output().get_node().get_type_name() == "NormalizeL2":
        end = end.get_source_output().get_node().input(0)
    pooled = end.get_source_output().get_node()
    match pooled.get_type_name():
        case "Gather":
            return end, pooled.input_value(0), _Vector.FIRST
        case "Divide":
            return end, _weighted(pooled.input_value(0).get_node()), _Vector.MEAN
        case "ReduceSum":
            return end, _weighted(pooled), _Vector.LAST
    raise CannotPack(f"its vector is made by {pooled.get_type_name()}")


def _weighted(total: Node) -> Output:
    """The token vectors in a sum of weighted ones."""
    weighted = total.input_value(0).get_node() if total.get_input_size() else total
    if total.get_type_name() != "ReduceSum" or weighted.get_type_name() != "Multiply":
        raise CannotPack("its vector is not a sum of token vectors")
    return weighted.input_value(0)


def _pool(hidden: Output, positions: Node, segments: Node, texts: int, kind: _Vector) -> Node:
    """The vectors of the texts, f32 [texts, size]: those of texts that are not there are zero."""
    numbers = op.constant(np.arange(1, texts + 1, dtype=np.int64).reshape(1, texts, 1))
    weights = op.convert(op.equal(numbers, op.unsqueeze(segments, _axes(1))), "f32")
    if kind is _Vector.MEAN:
        tokens = op.reduce_sum(weights, _axes(2), keep_dims=True)
        weights = op.divide(weights, op.maximum(tokens, np.float32(_MIN_TOKENS)))
    else:
        wanted: Node = op.constant(np.zeros((1, 1, 1), np.int64))
        if kind is _Vector.LAST:
            tokens = op.reduce_sum(op.convert(weights, "i64"), _axes(2), keep_dims=True)
            wanted = op.subtract(tokens, op.constant(np.ones((1, 1, 1), np.int64)))
        chosen = op.equal(op.unsqueeze(positions, _axes(1)), wanted)
        weights = op.multiply(weights, op.convert(chosen, "f32"))
    return op.squeeze(op.matmul(weights, hidden, transpose_a=False, transpose_b=False), _axes(0))
