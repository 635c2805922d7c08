"""pydantic-ai: agents with tools and typed output, over Chat Completions and Responses; streamed; two turns."""

import asyncio
import os

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.exceptions import UnexpectedModelBehavior, UsageLimitExceeded
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits

URL, MODEL = os.environ["NODE_URL"], os.environ.get("NODE_MODEL", "smollm2")
provider = OpenAIProvider(base_url=URL + "/v1", api_key="unused")


class Place(BaseModel):
    city: str = Field(max_length=20)
    country: str = Field(max_length=20)


class Trip(BaseModel):
    start: Place
    end: Place
    days: int = Field(ge=1, le=30)


async def main():
    for make in (OpenAIChatModel, OpenAIResponsesModel):
        model = make(MODEL, provider=provider)
        settings = {"max_tokens": 160, "temperature": 0.0}
        plain = Agent(model, instructions="Be brief.", model_settings=settings)
        first = await plain.run("What is the capital of France?")
        assert first.output
        second = await plain.run("And of Italy?", message_history=first.all_messages())
        assert second.output
        async with plain.run_stream("Count to three.") as stream:
            assert [piece async for piece in stream.stream_text(delta=True)]
        for kind in (NativeOutput, ToolOutput):
            typed = Agent(model, output_type=kind(Trip), model_settings=settings, retries=0)
            assert isinstance((await typed.run("From Rome, Italy to Paris, France in 3 days.")).output, Trip)
        tooled = Agent(model, model_settings=settings)

        @tooled.tool_plain
        def book(trip: Trip, travellers: list[str]) -> str:
            """Book a trip."""
            return "booked"

        # Whether a small model calls the tool, and rightly, is its own affair; that the requests pass is ours.
        try:
            await tooled.run("Book a trip from Rome to Paris.", usage_limits=UsageLimits(request_limit=3))
        except (UnexpectedModelBehavior, UsageLimitExceeded):
            pass


asyncio.run(main())
print("all as expected")
