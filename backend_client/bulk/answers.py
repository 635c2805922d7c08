"""Answers for the rows of a chunk: batches to embed, prompts to answer, patience with the fleet, and the results."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from backend_client.bulk.job import BulkJob
from backend_client.bulk.optional import need, schema_validator
from backend_client.bulk.window import together
from backend_client.client import InferenceClient
from backend_client.embed_many import cut
from backend_client.errors import (
    AuthenticationFailed,
    CloudRejected,
    ContextLengthExceeded,
    FleetOverloaded,
    InvalidAnswer,
    ModelNotFound,
    NPUError,
    NPUUnavailableError,
    PayloadTooLarge,
    RequestRejected,
)
from backend_client.results import CallOptions, ChatResult, EmbedOptions, GenerateResult, Origin


class Vectors:
    """Float32 vectors of `count` rows; those of rows that were refused are missing."""

    def __init__(self, count: int, dimensions: int) -> None:
        self._count = count
        self._dimensions = dimensions
        self._parts: dict[int, npt.NDArray[np.float32]] = {}

    def put(self, start: int, vectors: npt.NDArray[np.float32]) -> None:
        """Take the vectors of the rows from `start` on."""
        self._parts[start] = vectors

    def column(self, rows: list[int]) -> Any:
        """The vectors of these rows, which have some, as an Arrow column of fixed-size lists."""
        pa = need("pyarrow")
        parts = [self._parts[start] for start in sorted(self._parts)]
        if len(rows) < self._count:
            whole = np.empty((self._count, self._dimensions), np.float32)
            for start, vectors in self._parts.items():
                whole[start : start + len(vectors)] = vectors
            parts = [whole[rows]]
        arrays = [
            pa.FixedSizeListArray.from_arrays(pa.array(part.reshape(-1), pa.float32()), self._dimensions)
            for part in parts
        ]
        return pa.chunked_array(arrays, pa.list_(pa.float32(), self._dimensions))


# Waits for a fleet that is away, and finds the row that a node refuses.
#
# Only a refusal of the row itself rejects it. After any other failure it stays unanswered: the same command answers it
# later. Nodes refuse a request that kills its engine (`request_breaks_engine`), so such a row is found, too.

log = logging.getLogger(__name__)
R = TypeVar("R")

Serve = Callable[[Sequence[int]], Awaitable[None]]
"""Serves the rows in one request and keeps what came back."""
Refuse = Callable[[int, str], None]

# Pauses before a request is sent again when no node could take it: doubled from the first up to the last.
_FIRST_PAUSE_S = 0.5
_LAST_PAUSE_S = 15.0


class Unanswered(NPUError):
    """A request was not answered for as long as the patience allows, while others were."""


class Patience:
    """Sends requests again until they are answered. Gives up when nothing was answered for `limit` seconds."""

    def __init__(
        self,
        limit: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._limit = limit
        self._clock = clock
        self._sleep = sleep
        self._answered = clock()
        self._warned = False

    async def ask(self, request: Callable[[], Awaitable[R]], final: tuple[type[NPUError], ...] = ()) -> R:
        """The answer to one request. Raises refusals of the row, AuthenticationFailed and `final` errors at once.

        Raises NPUUnavailableError when nothing was answered for `limit` seconds, Unanswered when others were.
        """
        pause, failing_since = _FIRST_PAUSE_S, None
        while True:
            try:
                answer = await request()
            except (NPUUnavailableError, RequestRejected) as error:
                if refuses_row(error) or isinstance(error, (AuthenticationFailed, *final)):
                    raise
                failure: NPUError = error
            else:
                self._answered = self._clock()
                return answer
            now = self._clock()
            failing_since = now if failing_since is None else failing_since
            self._check(failure, now, failing_since)
            if not self._warned and not isinstance(failure, FleetOverloaded):
                self._warned = True
                log.warning("waiting up to %.0f s for an answer: %s", self._limit, failure.message)
            await self._sleep(min(getattr(failure, "retry_after", None) or pause, _LAST_PAUSE_S))
            pause = min(2 * pause, _LAST_PAUSE_S)

    async def serve(self, rows: Sequence[int], serve: Serve, refuse: Refuse) -> None:
        """Serve the rows in one request; in halves, and halves of halves, where a row of them is refused.

        Raises as `ask` does, but no refusals.
        """
        try:
            await self.ask(lambda: serve(rows))
        except (RequestRejected, InvalidAnswer) as error:
            if not refuses_row(error):
                raise
            if len(rows) == 1:
                refuse(rows[0], reason_of(error))
                return
        else:
            return
        middle = len(rows) // 2
        for part in (rows[:middle], rows[middle:]):
            await self.serve(part, serve, refuse)

    def _check(self, failure: NPUError, now: float, failing_since: float) -> None:
        """Raise when waiting is over."""
        silence = now - self._answered
        known: dict[str, Any] = {"attempts": failure.attempts, "request_id": failure.request_id}
        if silence > self._limit:
            raise NPUUnavailableError(f"{failure.message}; nothing was answered for {silence:.0f} s", **known)
        waited = now - failing_since
        if waited > self._limit and not isinstance(failure, FleetOverloaded):
            raise Unanswered(f"not answered for {waited:.0f} s, while others were: {failure.message}", **known)


def refuses_row(error: NPUError) -> bool:
    """Whether the error is about the row that was sent, and not about the nodes, their models, the key or the cloud."""
    if isinstance(error, RequestRejected) and not isinstance(
        error, AuthenticationFailed | ModelNotFound | CloudRejected
    ):
        return error.status in {None, 400, 413, 422}
    return isinstance(error, InvalidAnswer)


def reason_of(error: RequestRejected | InvalidAnswer) -> str:
    """Why a row was refused, without the name of a node: the same on every run."""
    if isinstance(error, InvalidAnswer):
        return "the answer does not match the schema"
    if isinstance(error, ContextLengthExceeded):
        return "longer than the model accepts"
    if isinstance(error, PayloadTooLarge):
        return "larger than a node accepts"
    if error.code == "request_breaks_engine":
        return "takes down the engine that runs it"
    return f"refused: {error.message.removeprefix(f'{error.node}: ')}"


# The results of serving a chunk: a column of results for its rows, and the rows that were refused.

_INTEGERS = ("num_input_tokens", "num_generated_tokens", "npu_busy_us")
_TEXTS = ("finish_reason", "model", "node", "device", "space", "error")


@dataclass(slots=True)
class Results:
    """Results of `count` rows, filled part by part. `values` are Vectors, or a list of texts.

    `refused` says of a row why it has none. `tokens` counts those of all inputs; `served` rows by node and device.
    """

    count: int
    values: Any = None
    tokens: int = 0
    refused: dict[int, str] = field(default_factory=dict)
    served: Counter[str] = field(default_factory=Counter)
    num_input_tokens: list[int | None] = field(default_factory=list)
    num_generated_tokens: list[int | None] = field(default_factory=list)
    finish_reason: list[str | None] = field(default_factory=list)
    model: list[str | None] = field(default_factory=list)
    node: list[str | None] = field(default_factory=list)
    device: list[str | None] = field(default_factory=list)
    emulated: list[bool | None] = field(default_factory=list)
    space: list[str | None] = field(default_factory=list)
    npu_busy_us: list[int | None] = field(default_factory=list)
    error: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Make the columns as long as there are rows."""
        for name in (*_INTEGERS, *_TEXTS, "emulated"):
            setattr(self, name, [None] * self.count)
        self.error = [""] * self.count

    def put_origin(self, start: int, stop: int, origin: Origin) -> None:
        """Record who served rows in one request. Its NPU time is divided among them so that the sum is exact."""
        count = stop - start
        self.model[start:stop] = [origin.model] * count
        self.node[start:stop] = [origin.node] * count
        self.device[start:stop] = [origin.device] * count
        self.emulated[start:stop] = [origin.emulated] * count
        if origin.npu_busy_delta_us is not None:
            share, rest = divmod(origin.npu_busy_delta_us, count)
            self.npu_busy_us[start:stop] = [share + 1] * rest + [share] * (count - rest)
        self.served[f"{origin.node} {origin.device or origin.source}"] += count

    def columns(self) -> dict[str, Any]:
        """The columns of the output that are not the input's or the values', as Arrow arrays."""
        pa = need("pyarrow")
        made = {name: _array(getattr(self, name), pa.int64()) for name in _INTEGERS}
        made |= {name: _array(getattr(self, name), pa.string()) for name in _TEXTS}
        made["emulated"] = _array(self.emulated, pa.bool_())
        return made


def _array(values: list[Any], kind: Any) -> Any:
    """The Arrow array. Most columns of a chunk have one value, which need not be converted row by row."""
    pa = need("pyarrow")
    if values and values.count(values[0]) == len(values):
        return pa.repeat(pa.scalar(values[0], kind), len(values))
    return pa.array(values, kind)


# Embedding the texts of a chunk.

# A request that took less may be doubled; one that took more is halved. Well below the limit of an attempt, 10 s.
_QUICK_S, _SLOW_S = 1.0, 4.0
# In one request, and on their way in all: with many nodes, requests stay smaller.
_MOST_TEXTS, _MOST_UNDER_WAY = 256, 8192
_FEW_TEXTS = 256


class BatchSize:
    """How many texts a request should have: half the requests cost the client a quarter less CPU for each text.

    Grows from `least` while the fleet answers at once, and shrinks back when it does not. `slots`: requests at once.
    """

    def __init__(self, least: int, slots: int = 1) -> None:
        self._least = least
        self._most = min(_MOST_TEXTS, max(_FEW_TEXTS, _MOST_UNDER_WAY // slots))
        self.texts = least

    def observe(self, texts: int, seconds: float) -> None:
        """Record how long a request of so many texts took, its wait at the node included."""
        if seconds > _SLOW_S:
            self.texts = max(self._least, self.texts // 2)
        elif seconds < _QUICK_S and texts == self.texts:
            self.texts = max(self.texts, min(2 * self.texts, self._most))

    def refused(self, texts: int) -> None:
        """Record that a node takes no request of so many texts."""
        if texts > self._least:
            self._most = self.texts = max(self._least, texts // 2)


class Embedding:
    """Embeds chunks in batches; at most `slots` of them are on their way at once, over all chunks."""

    def __init__(
        self, client: InferenceClient, job: BulkJob, options: EmbedOptions, slots: int, patience: float
    ) -> None:
        self._client = client
        self._job = job
        self._options = options
        self._slots = asyncio.Semaphore(slots)
        self._count = slots
        self._patience = Patience(patience)
        self._batch = client.npu.options.batch
        self._size = BatchSize(self._batch.texts, slots)

    @property
    def rows_ahead(self) -> int:
        """See Work: two requests for each that may be on its way; large ones need not wait for each other."""
        return self._count * max(2 * self._batch.texts, self._size.texts)

    def problems(self, values: Sequence[Any]) -> dict[int, str]:
        """Which values cannot be sent, and why."""
        return {
            row: problem
            for row, value in enumerate(values)
            # Most texts pass without a call.
            if not (type(value) is str and value.isascii()) and (problem := text_problem(value))
        }

    async def run(self, inputs: Sequence[Any]) -> Results:
        """The vectors of the texts. Raises what `Patience.serve` raises."""
        vectors = Vectors(len(inputs), self._job.dimensions)
        results = Results(len(inputs), vectors)

        async def serve(rows: Sequence[int]) -> None:
            start, stop = rows[0], rows[-1] + 1
            began = time.monotonic()
            try:
                batch = await self._client.embed_batch(inputs[start:stop], **self._options)
            except PayloadTooLarge:
                self._size.refused(stop - start)
                raise
            self._size.observe(stop - start, time.monotonic() - began)
            vectors.put(start, batch.vectors)
            results.tokens += batch.usage.prompt_tokens
            results.put_origin(start, stop, batch)
            results.space[start:stop] = [batch.space] * (stop - start)

        def refuse(row: int, reason: str) -> None:
            results.refused[row] = reason

        async def part(rows: Sequence[int]) -> None:
            async with self._slots:
                await self._patience.serve(rows, serve, refuse)

        await together(part(range(start, stop)) for start, stop in self._batches(inputs))
        return results

    def _batches(self, texts: Sequence[str]) -> list[tuple[int, int]]:
        """The rows of each request, as (start, stop)."""
        limit = self._batch.tokens * self._batch.bytes_per_token
        length = sum(map(len, texts)) / max(1, len(texts))
        if length * self._batch.texts > limit:
            return cut(texts, self._batch)
        # As many bytes more as texts: it is quick with those, too.
        grown = limit * self._size.texts / self._batch.texts
        size = min(self._size.texts, max(self._batch.texts, int(grown / max(1.0, length))))
        return [(start, min(start + size, len(texts))) for start in range(0, len(texts), size)]


def text_problem(value: Any) -> str:
    """Why a value is no text that can be sent; "" when it is."""
    if value is None:
        return "null"
    if isinstance(value, bytes):
        return "invalid UTF-8"
    if not isinstance(value, str):
        return f"not text, but {type(value).__name__}"
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            return "a lone surrogate, which is not valid Unicode"
    return ""


# Answering the prompts, or conversations, of a chunk.


class Generation:
    """Answers row by row; at most `slots` rows are on their way at once.

    A job with a schema, or with messages, goes the way of chats; a plain prompt that of `generate`.
    """

    def __init__(
        self, client: InferenceClient, job: BulkJob, options: CallOptions, slots: int, patience: float
    ) -> None:
        self._client = client
        self._job = job
        self._common: dict[str, Any] = dict(options)
        self._sampling = dict(job.options)
        self._schema = self._sampling.pop("response_schema", None)
        self._validator: Any = None if self._schema is None else schema_validator(self._schema)
        self._slots = asyncio.Semaphore(slots)
        self._patience = Patience(patience)
        self.rows_ahead = 2 * slots

    def problems(self, values: Sequence[Any]) -> dict[int, str]:
        """Which values cannot be sent, and why."""
        return {row: problem for row, value in enumerate(values) if (problem := self._problem(value))}

    def _problem(self, value: Any) -> str:
        if not self._job.messages:
            return text_problem(value)
        try:
            messages = conversation(value)
        except ValueError as error:
            return str(error)
        try:
            json.dumps(messages, ensure_ascii=False).encode()
        except (UnicodeEncodeError, TypeError):
            return "the messages hold a lone surrogate, or what is not JSON"
        return ""

    async def run(self, inputs: Sequence[Any]) -> Results:
        """The answers. Raises what `Patience.serve` raises."""
        results = Results(len(inputs), [None] * len(inputs))

        async def serve(rows: Sequence[int]) -> None:
            for row in rows:
                self._put(results, row, await self._answer(inputs[row]))

        def refuse(row: int, reason: str) -> None:
            results.refused[row] = reason

        async def part(row: int) -> None:
            async with self._slots:
                await self._patience.serve([row], serve, refuse)

        await together(part(row) for row in range(len(inputs)))
        return results

    async def _answer(self, value: Any) -> GenerateResult | ChatResult:
        if not self._job.messages and self._schema is None:
            sampling = {
                {"max_tokens": "max_new_tokens"}.get(name, name): given for name, given in self._sampling.items()
            }
            return await self._client.generate(value, **sampling, **self._common)
        messages = conversation(value) if self._job.messages else [{"role": "user", "content": value}]
        if self._schema is None:
            return await self._client.chat(messages, **self._sampling, **self._common)
        form = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": self._schema}}
        result = await self._client.chat(messages, response_format=form, **self._sampling, **self._common)
        if result.finish_reason != "length" and not self._matches(result.text):
            raise InvalidAnswer(
                "the answer does not match the schema", text=result.text, finish_reason=result.finish_reason
            )
        return result

    def _matches(self, text: str) -> bool:
        try:
            return bool(self._validator.is_valid(json.loads(text)))
        except (ValueError, RecursionError):
            return False

    def _put(self, results: Results, row: int, answer: GenerateResult | ChatResult) -> None:
        results.values[row] = answer.text
        results.num_input_tokens[row] = answer.usage.prompt_tokens
        results.num_generated_tokens[row] = answer.usage.completion_tokens
        results.finish_reason[row] = answer.finish_reason
        if self._schema is not None and answer.finish_reason == "length":
            results.error[row] = "the answer was cut at max_tokens, so it does not match the schema"
        results.tokens += answer.usage.prompt_tokens
        results.put_origin(row, row + 1, answer)


def conversation(value: Any) -> list[dict[str, Any]]:
    """The messages of a row: a list of objects, or its JSON. Raises ValueError, which says what is wrong."""
    if value is None:
        raise ValueError("null")
    if isinstance(value, bytes):
        raise ValueError("invalid UTF-8")
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, list) or not value or not all(isinstance(item, Mapping) for item in value):
        raise ValueError("not a list of messages")
    # Arrow gives every struct all fields of its type: what a message does not have is null.
    return [{name: part for name, part in item.items() if part is not None} for item in value]
