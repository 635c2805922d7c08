"""Answers for the rows of a chunk: batches to embed, prompts to answer, patience with the fleet, and the results.

Only a refusal of the row itself rejects it, also that of a row which kills its engine (`request_breaks_engine`).
After any other failure it stays unanswered: the same command answers it later.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any

import numpy as np

from backend_client.bulk.job import RESULT_TYPES, BulkJob, BulkRequest, Chunk, conversation, schema_validator
from backend_client.bulk.stores import need
from backend_client.client import InferenceClient, NPUClient
from backend_client.embed_many import cut, in_halves
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
from backend_client.results import CallOptions, ChatResult, GenerateResult, Origin

log = logging.getLogger(__name__)
Serve = Callable[[Sequence[int]], Awaitable[None]]
"""Serves the rows in one request and keeps what came back."""
# Pauses before a request is sent again when no node could take it: doubled from the first up to the last.
_FIRST_PAUSE_S = 0.5
_LAST_PAUSE_S = 15.0


class Unanswered(NPUError):
    """A request failed each time it was sent, while the fleet answered others."""


class Patience:
    """Waits for a fleet that is down, and tells it from a request that always fails.

    A failed request is sent again only after the fleet has answered another one, of other rows or the `probe`. So one
    that fails `attempts` times is itself at fault. Gives up when nothing is answered for `limit` seconds.
    """

    def __init__(
        self,
        limit: float,
        attempts: int,
        probe: Callable[[], Awaitable[object]],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._limit = limit
        self._attempts = attempts
        self._probe = probe
        self._clock = clock
        self._sleep = sleep
        # When anything was answered last, when a row was, and how many answers there were.
        self._answered = self._served = clock()
        self._answers = 0
        self._probing = asyncio.Lock()
        self._warned = False

    async def wait(self, final: tuple[type[NPUError], ...] = ()) -> None:
        """Send the probe until it is answered; a refusal is an answer.

        Raises NPUUnavailableError after the limit; AuthenticationFailed and `final` errors at once.
        """
        pause = _FIRST_PAUSE_S
        while True:
            try:
                await self._probe()
            except (NPUUnavailableError, RequestRejected) as error:
                if isinstance(error, (AuthenticationFailed, *final)):
                    raise
                if not refuses_row(error):
                    silence = self._clock() - self._answered
                    if silence > self._limit:
                        raise _like(error, f"{error.message}; nothing was answered for {silence:.0f} s") from None
                    await self._pause(error, pause)
                    pause *= 2
                    continue
            self._note_answer()
            return

    async def serve(self, rows: Sequence[int], serve: Serve) -> dict[int, str]:
        """Serve the rows in one request, and in halves where a row of them is refused. Returns why, by rows.

        Raises Unanswered when the request is at fault but not refused, and what `wait` raises.
        """
        refused = {}

        async def part(first: int, last: int) -> None:
            try:
                await self._send(rows[first:last], serve)
            except (RequestRejected, InvalidAnswer) as error:
                if last - first > 1 or not refuses_row(error):
                    raise
                refused[rows[first]] = reason_of(error)

        await in_halves(0, len(rows), part, refuses_row)
        return refused

    async def _send(self, rows: Sequence[int], serve: Serve) -> None:
        failed, pause, began = 0, _FIRST_PAUSE_S, self._clock()
        while True:
            try:
                await serve(rows)
            except (NPUUnavailableError, RequestRejected, InvalidAnswer) as error:
                if refuses_row(error):
                    self._note_answer()
                    raise
                # A refused key, too: a proxy may answer 403 to a single row. The probe tells.
                failure: NPUError = error
            else:
                self._note_answer()
                self._served = self._clock()
                return
            await self._another_answer(failure, pause)
            pause *= 2
            if isinstance(failure, FleetOverloaded):
                # The nodes had no room, which is no fault of the rows, unless they have room for nothing but probes.
                given_up = self._clock() - max(began, self._served) > self._limit
            else:
                failed += 1
                given_up = failed >= self._attempts
            if given_up:
                raise Unanswered(
                    f"not answered, while other requests were: {failure.message}",
                    attempts=failure.attempts,
                    request_id=failure.request_id,
                )

    async def _another_answer(self, failure: NPUError, pause: float) -> None:
        """Return when the fleet has answered a request since this failure."""
        answers = self._answers
        await self._pause(failure, pause)
        async with self._probing:
            if self._answers == answers:
                try:
                    await self.wait()
                except NPUUnavailableError as error:
                    # What the row met says more than what the probe did, such as that the spend cap is reached.
                    problem = f"{failure.message}; a probe of the fleet failed, too: {error.message}"
                    raise _like(failure, problem) from None

    def _note_answer(self) -> None:
        self._answered = self._clock()
        self._answers += 1

    async def _pause(self, failure: NPUError, pause: float) -> None:
        if self._limit and not self._warned and not isinstance(failure, FleetOverloaded):
            self._warned = True
            log.warning("waiting up to %.0f s for the fleet to answer: %s", self._limit, failure.message)
        await self._sleep(min(getattr(failure, "retry_after", None) or pause, _LAST_PAUSE_S))


def _like(failure: NPUError, message: str) -> NPUUnavailableError:
    return NPUUnavailableError(message, attempts=failure.attempts, request_id=failure.request_id)


def refuses_row(error: NPUError) -> bool:
    """Whether the error is about the row that was sent, not about nodes, models, the key or the cloud."""
    if isinstance(error, RequestRejected) and not isinstance(
        error, AuthenticationFailed | ModelNotFound | CloudRejected
    ):
        return error.status in {None, 400, 413, 422}
    return isinstance(error, InvalidAnswer)


def reason_of(error: RequestRejected | InvalidAnswer) -> str:
    """Why a row was refused, the same on every run: without the name of a node."""
    if isinstance(error, InvalidAnswer):
        return "the answer does not match the schema"
    if isinstance(error, ContextLengthExceeded):
        return "longer than the model accepts"
    if isinstance(error, PayloadTooLarge):
        return "larger than a node accepts"
    if error.code == "request_breaks_engine":
        return "takes down the engine that runs it"
    return f"refused: {error.message.removeprefix(f'{error.node}: ')}"


class Results:
    """Results of a chunk, filled part by part: `values` are vectors (n, d), float32, or a list of texts.

    `columns` say who answered; `refused`, why a row has no result. `served` counts rows by node and device.
    """

    def __init__(self, count: int, job: BulkJob) -> None:
        self.values: Any = [None] * count if job.kind == "generate" else np.zeros((count, job.dimensions), np.float32)
        self.tokens = 0
        self.refused: dict[int, str] = {}
        self.served: Counter[str] = Counter()
        self.columns: dict[str, list[Any]] = {name: [None] * count for name in RESULT_TYPES}
        self.columns["error"] = [""] * count

    def put(self, rows: Iterable[int], **values: Any) -> None:
        for name, value in values.items():
            column = self.columns[name]
            for row in rows:
                column[row] = value

    def put_origin(self, rows: Sequence[int], origin: Origin) -> None:
        """Record who served a request. Its costs are divided among its rows; sums of NPU time are exact."""
        self.put(rows, model=origin.model, node=origin.node, device=origin.device, emulated=origin.emulated)
        if origin.npu_busy_delta_us is not None:
            share, rest = divmod(origin.npu_busy_delta_us, len(rows))
            self.put(rows[:rest], npu_busy_us=share + 1)
            self.put(rows[rest:], npu_busy_us=share)
        if origin.joules is not None:
            self.put(rows, joules=origin.joules / len(rows))
        self.served[f"{origin.node} {origin.device or origin.source}"] += len(rows)

    def values_of(self, rows: list[int]) -> Any:
        pa = need("pyarrow")
        if isinstance(self.values, list):
            return pa.array([self.values[row] for row in rows], pa.string())
        vectors = self.values if len(rows) == len(self.values) else self.values[rows]
        return pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])


class Work:
    """Serves the rows of a job, texts in batches and prompts one by one, in at most `slots` requests at once."""

    def __init__(
        self,
        client: InferenceClient | NPUClient,
        options: CallOptions,
        job: BulkJob,
        request: BulkRequest,
        slots: int,
    ) -> None:
        self._client = client
        self._options = options
        self._job = job
        schema = job.options.get("response_schema")
        self._validator: Any = None if schema is None else schema_validator(schema)
        self._slots = asyncio.Semaphore(slots)
        self._patience = Patience(request.patience, request.attempts, self._probe)
        # Two requests for each that may be on its way, so that the nodes never wait.
        self.rows_ahead = 2 * slots * (client.core.options.batch.texts if job.kind == "embed" else 1)

    async def run(self, chunk: Chunk) -> Results:
        inputs = chunk.inputs
        results = Results(len(inputs), self._job)
        results.refused = {row: problem for row, value in enumerate(inputs) if (problem := self._job.problem(value))}
        serve = self._embed if self._job.kind == "embed" else self._answer

        async def part(rows: Sequence[int]) -> None:
            async with self._slots:
                try:
                    refused = await self._patience.serve(rows, lambda some: serve(inputs, some, results))
                    results.refused.update(refused)
                except Unanswered as error:
                    first, last = chunk.rows[rows[0]], chunk.rows[rows[-1]]
                    where = f"row {first}" if first == last else f"one of the rows {first} to {last}"
                    raise Unanswered(f"{where}: {error.message}") from None

        sent = [row for row in range(len(inputs)) if row not in results.refused]
        parts = [(number, number + 1) for number in range(len(sent))]
        if self._job.kind == "embed":
            parts = cut([inputs[row] for row in sent], self._client.core.options.batch)
        await together(part(sent[start:stop]) for start, stop in parts)
        return results

    async def _probe(self) -> None:
        """Send a small request in the way of the rows."""
        if self._job.kind == "embed":
            await self._client.embed_batch(["a"], **self._options)
        else:
            await self._ask([{"role": "user", "content": "a"}] if self._job.messages else "a", max_tokens=1)

    async def _embed(self, inputs: Sequence[Any], rows: Sequence[int], results: Results) -> None:
        truncate = bool(self._job.options.get("truncate"))
        batch = await self._client.embed_batch([inputs[row] for row in rows], truncate=truncate, **self._options)
        results.values[rows] = batch.vectors
        results.tokens += batch.usage.prompt_tokens
        results.put_origin(rows, batch)
        results.put(rows, space=batch.space)

    async def _answer(self, inputs: Sequence[Any], rows: Sequence[int], results: Results) -> None:
        (row,) = rows
        sampling = dict(self._job.options)
        if self._validator is not None:
            schema = {"name": "answer", "strict": True, "schema": sampling.pop("response_schema")}
            sampling["response_format"] = {"type": "json_schema", "json_schema": schema}
        answer = await self._ask(inputs[row], **sampling)
        text, finish_reason, usage = answer.text, answer.finish_reason, answer.usage
        if self._validator is not None:
            if finish_reason == "length":
                results.put(rows, error="the answer was cut at max_tokens, so it does not match the schema")
            elif not self._matches(text):
                raise InvalidAnswer("the answer does not match the schema", text=text, finish_reason=finish_reason)
        results.values[row] = text
        results.put(
            rows,
            num_input_tokens=usage.prompt_tokens,
            num_generated_tokens=usage.completion_tokens,
            finish_reason=finish_reason,
        )
        results.tokens += usage.prompt_tokens
        results.put_origin(rows, answer)

    async def _ask(self, value: Any, **sampling: Any) -> GenerateResult | ChatResult:
        """Send a chat for messages and for answers with a schema, else a prompt."""
        if self._validator is None and not self._job.messages:
            most = sampling.pop("max_tokens", None)
            return await self._client.generate(value, max_new_tokens=most, **sampling, **self._options)
        messages = conversation(value) if self._job.messages else [{"role": "user", "content": value}]
        return await self._client.chat(messages, **sampling, **self._options)

    def _matches(self, text: str) -> bool:
        try:
            return bool(self._validator.is_valid(json.loads(text)))
        except (ValueError, RecursionError):
            return False


# Several coroutines as one.


async def together(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all of them. Raises the first error as it is, not in a group; none runs on after this returns."""
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in coroutines:
                group.create_task(coroutine)
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
    else:
        return
    raise first


async def cancelled(tasks: Iterable[asyncio.Task[Any]]) -> None:
    ended = list(tasks)
    for task in ended:
        task.cancel()
    # Also of those that had ended: asyncio logs errors that nobody looked at.
    await asyncio.gather(*ended, return_exceptions=True)
