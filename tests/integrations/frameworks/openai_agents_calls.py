"""openai-agents: tools, typed output, handoff, streaming and a second turn, by both of OpenAI's APIs."""

import asyncio
import os

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from agents.exceptions import MaxTurnsExceeded, ModelBehaviorError
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

URL, MODEL = os.environ["NODE_URL"], os.environ.get("NODE_MODEL", "smollm2")
set_tracing_disabled(True)
client = AsyncOpenAI(base_url=URL + "/v1", api_key="unused")


class City(BaseModel):
    name: str = Field(max_length=20)
    population: int = Field(ge=0, le=100_000_000)


@function_tool
def weather(city: City, unit: str = "celsius") -> str:
    """Get the weather."""
    return f"sunny in {city.name}"


async def main():
    for make in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = make(MODEL, openai_client=client)
        settings = ModelSettings(temperature=0.0, max_tokens=160)
        plain = Agent("plain", instructions="Be brief.", model=model, model_settings=settings)
        first = await Runner.run(plain, "What is the capital of France?")
        assert first.final_output
        second = await Runner.run(plain, [*first.to_input_list(), {"role": "user", "content": "And of Italy?"}])
        assert second.final_output
        streamed = Runner.run_streamed(plain, "Count to three.")
        assert [event async for event in streamed.stream_events()]
        typed = Agent("typed", model=model, output_type=City, model_settings=settings)
        assert isinstance((await Runner.run(typed, "Paris has 2 million people.")).final_output, City)
        forced = ModelSettings(temperature=0.0, max_tokens=160, tool_choice="required")
        for extra in ({}, {"output_type": City}, {"handoffs": [plain]}):
            agent = Agent("tooled", model=model, tools=[weather], model_settings=forced, **extra)
            try:
                await Runner.run(agent, "How is the weather in Paris?", max_turns=3)
            except (MaxTurnsExceeded, ModelBehaviorError):
                pass  # what a small model makes of it is its own affair


asyncio.run(main())
print("all as expected")
