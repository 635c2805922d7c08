"""Jobs of encoder engines, whatever their task: rows of token ids in, one row of numbers for each out.

Their messages, how fast they are computed, and the options that all encoders share."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import msgspec
import numpy as np
import numpy.typing as npt
from annotated_types import Ge, Gt, Le, Len

from worker_node.core.types import NOT_MEASURED, Busy, Device
from worker_node.engines.options import BlobOptions, EngineOptions, Option
from worker_node.engines.protocol import TOKEN_DTYPE, VECTOR_DTYPE, Outcome

INPUT_IDS = "input_ids"
ATTENTION_MASK = "attention_mask"
TOKEN_TYPES = "token_type_ids"  # noqa: S105  (the name of an input)


class RowJob(msgspec.Struct, frozen=True, tag="rows", array_like=True):
    """Encode `len(lengths)` rows of token ids, which stand one after another in `tokens` (int32).

    For models with token types, the tokens of row i from `second[i]` on are of type 1.
    """

    id: int
    tokens: bytes
    lengths: list[int]
    deadline: float
    interactive: bool = True
    second: list[int] = []

    @property
    def ends(self) -> float:
        return self.deadline

    def timeless(self) -> RowJob:
        return RowJob(0, self.tokens, self.lengths, 0.0, second=self.second)


def row_job(
    rows: Sequence[Sequence[int]], deadline: float, *, interactive: bool = True, second: Sequence[int] = ()
) -> RowJob:
    lengths = [len(row) for row in rows]
    flat = np.fromiter(itertools.chain.from_iterable(rows), TOKEN_DTYPE, count=sum(lengths))
    return RowJob(0, flat.tobytes(), lengths, deadline, interactive, list(second))


class RowResult(Outcome, frozen=True, array_like=True):
    """The result of a job; see also `serving.run.SingleResult`.

    `data` has the model's output for each row: float32, row-major. `device_tokens` are those that the device computed
    for the job, padding included. The cost of a run with rows of several jobs is divided by rows.
    """

    id: int
    data: bytes
    started: float
    inference_s: float
    busy: Busy = NOT_MEASURED
    device_tokens: int | None = None
    measured_tokens: int = 0
    measured_s: float = 0.0

    @property
    def last(self) -> bool:
        return True

    def rows(self, count: int) -> npt.NDArray[np.float32]:
        return np.frombuffer(self.data, VECTOR_DTYPE).reshape(count, -1)


@dataclass(slots=True)
class Throughput:
    """Tokens that the device computes per second, measured while more texts wait than it can run."""

    tokens: int = 0
    seconds: float = 0.0
    _saturated_since: float | None = None

    def run_ended(self, tokens: int, now: float) -> None:
        if self._saturated_since is not None:
            self.tokens += tokens
            self.seconds += now - self._saturated_since
            self._saturated_since = now

    def mark_progress(self, now: float, *, saturated: bool) -> None:
        """All runs that can start now have started; `saturated`: texts are left over."""
        if not saturated:
            self._saturated_since = None
        elif self._saturated_since is None:
            self._saturated_since = now

    def take(self) -> tuple[int, float]:
        """Return the tokens and the seconds since the last call."""
        taken = self.tokens, self.seconds
        self.tokens, self.seconds = 0, 0.0
        return taken


@dataclass(frozen=True, kw_only=True)
class DynamicEncoderOptions(EngineOptions):
    """Precision, streams and batches. None takes what was measured to be best.

    `context_limit` is the model's, in tokens; the node sets it. Lengths are not rounded up where it is unknown.
    """

    devices: ClassVar[frozenset[Device]] = frozenset({Device.CPU, Device.GPU})
    runner: ClassVar[str] = "worker_node.encoders.dynamic:DynamicEncoder"

    engine: str = ""

    precision: Annotated[
        str | None, Option("OpenVINO's inference precision, for example f32 or bf16", default="the device's own")
    ] = None
    streams: Annotated[
        int | None,
        Ge(0),
        Le(64),
        Option(
            "batches that run at the same time; 0 leaves it to the device",
            default="one for each core of a CPU with at most 4, else what the device takes",
            also=("nireq",),
        ),
    ] = None
    max_batch_tokens: Annotated[
        int | None, Gt(0), Option("tokens of one batch, padding included", default="256 on a CPU, 8192 on a GPU")
    ] = None
    max_batch_rows: Annotated[int, Gt(0), Option("texts of one batch")] = 64
    length_multiple: Annotated[
        int | None,
        Ge(1),
        Le(256),
        Option(
            "texts are padded to multiples of this many tokens, but not beyond the model's limit; those of one padded "
            "length run together",
            default="8 on a CPU, 16 where it computes in bf16 or f16, 32 on a GPU",
        ),
    ] = None
    context_limit: int | None = None


@dataclass(frozen=True, kw_only=True)
class StaticEncoderOptions(BlobOptions):
    """Shapes. In an engine `npu_buckets` are ascending and never empty."""

    devices: ClassVar[frozenset[Device]] = frozenset({Device.NPU})
    runner: ClassVar[str] = "worker_node.encoders.static:StaticEncoder"

    engine: str = ""

    npu_buckets: Annotated[
        tuple[Annotated[int, Ge(8)], ...],
        Len(1),
        Option(
            "lengths in tokens that the model is compiled for; a text runs in the smallest that holds it",
            default="16, 24, 32, 64, 128 … up to the model's limit",
        ),
    ] = ()
    npu_batch_size: Annotated[int, Ge(1), Le(64), Option("texts of one run")] = 1
    infer_requests: Annotated[
        int | None,
        Ge(1),
        Le(64),
        Option(
            "runs that the NPU is given at the same time, while they have at most 4096 tokens together; 1 compiles for "
            "the shortest single run",
            default="what the NPU's plugin recommends: 4 on NPU 3720, 8 on later ones",
        ),
    ] = None
