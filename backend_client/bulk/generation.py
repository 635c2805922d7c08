"""Answering the prompts, or conversations, of a chunk."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from backend_client.bulk.embedding import text_problem
from backend_client.bulk.job import BulkJob
from backend_client.bulk.optional import schema_validator
from backend_client.bulk.patience import Patience
from backend_client.bulk.results import Results
from backend_client.bulk.together import together
from backend_client.client import InferenceClient
from backend_client.errors import InvalidAnswer
from backend_client.results import CallOptions, ChatResult, GenerateResult


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
