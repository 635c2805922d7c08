"""A service as a user writes it: the type check of the repository, which is strict, includes it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

from pydantic import BaseModel

import backend_client
from backend_client import InferenceClient, NPUClient, NPUUnavailableError, sync
from backend_client.errors import InvalidAnswer
from backend_client.testing import FakeFleet


class Invoice(BaseModel):
    number: str
    total: float


async def vector(client: NPUClient, text: str) -> list[float]:
    return await client.embed(text, timeout=5, priority="batch")


async def answer(client: InferenceClient, question: str) -> str:
    view = client.with_options(timeout=10, extra_headers={"X-Tenant": "a"})
    reply = await view.chat([{"role": "user", "content": question}], temperature=0, max_tokens=100)
    for call in reply.tool_calls:
        print(call.name, call.parsed_arguments())
    return reply.text if reply.finish_reason == "stop" else reply.text + "…"


async def invoice(client: InferenceClient, letter: str) -> Invoice | None:
    try:
        return await client.parse([{"role": "user", "content": letter}], Invoice)
    except InvalidAnswer as error:
        print(len(error.text), error.finish_reason)
    except NPUUnavailableError as error:
        print(error.retry_after, [attempt.outcome for attempt in error.attempts])
    return None


async def pieces(client: InferenceClient, question: str) -> AsyncIterator[str]:
    async with client.stream_chat([{"role": "user", "content": question}]) as stream:
        async for delta in stream:
            yield delta.text
    if stream.result is not None:
        print(stream.result.usage.completion_tokens)


async def captions(client: NPUClient, recording: Path) -> list[tuple[float, str]]:
    heard = await client.transcribe(recording, timestamp_granularities=["word"], timeout=600)
    with recording.open("rb") as file:
        again = await client.transcribe(file, language=heard.language)
    return [(word.start, word.word) for word in again.words] or [(part.start, part.text) for part in heard.segments]


async def best(client: NPUClient, question: str, passages: list[str]) -> str:
    ranking = await client.rerank(question, passages, top_n=1)
    return ranking.documents[0].text


async def over_a_fake_fleet(question: str) -> str:
    with FakeFleet(2) as fleet:
        async with fleet.async_client() as client:
            return (await client.chat([{"role": "user", "content": question}])).text


async def through_the_sdk(question: str) -> str | None:
    async with backend_client.openai(nodes=["http://127.0.0.1:8081"]) as openai:
        reply = await openai.chat.completions.create(
            model="smollm2-135m-instruct", messages=[{"role": "user", "content": question}]
        )
        return reply.choices[0].message.content


def blocking(texts: list[str]) -> int:
    with FakeFleet(2) as fleet, sync.NPUClient(fleet.urls) as client:
        vectors = client.embed_many(texts)
        ranked = client.rerank("query", texts, top_n=2)
        return len(vectors) + len(ranked.documents) + client.count_tokens("text")
