"""autogen: the model client with tools, JSON, typed output and streams; an assistant agent; its Ollama client."""

import asyncio
import os

from autogen_agentchat.agents import AssistantAgent
from autogen_core import CancellationToken
from autogen_core.models import ModelFamily, SystemMessage, UserMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.ollama import OllamaChatCompletionClient
from autogen_ext.models.openai import OpenAIChatCompletionClient
from pydantic import BaseModel, Field

URL, MODEL = os.environ["NODE_URL"], os.environ.get("NODE_MODEL", "smollm2")
INFO = {
    "vision": False,
    "function_calling": True,
    "json_output": True,
    "structured_output": True,
    "family": ModelFamily.UNKNOWN,
}


class Colour(BaseModel):
    name: str = Field(max_length=20)
    warm: bool


async def mix(first: str, second: str, parts: list[int]) -> str:
    """Mix two colours."""
    return f"{first} and {second}"


async def main():
    tool = FunctionTool(mix, description="Mix two colours.")
    turns = [SystemMessage(content="Be brief."), UserMessage(content="Mix red and blue.", source="user")]
    openai = OpenAIChatCompletionClient(
        model=MODEL, base_url=URL + "/v1", api_key="unused", model_info=INFO, max_tokens=120, max_retries=0
    )
    ollama = OllamaChatCompletionClient(model=MODEL, host=URL, model_info=INFO, options={"num_predict": 120})
    for client in (openai, ollama):
        assert (await client.create(turns)).content
        assert [piece async for piece in client.create_stream(turns)]
        Colour.model_validate_json((await client.create(turns, json_output=Colour)).content)
        await client.create(turns, tools=[tool])
        assert (
            isinstance((await client.create(turns, tools=[tool], tool_choice="required")).content, list)
            or client is ollama
        )
    agent = AssistantAgent("painter", openai, tools=[mix], reflect_on_tool_use=True)
    assert await agent.run(task="Mix red and blue.", cancellation_token=CancellationToken())
    typed = AssistantAgent("namer", openai, output_content_type=Colour)
    assert isinstance((await typed.run(task="Name a colour.")).messages[-1].content, Colour)
    await openai.close()


asyncio.run(main())
print("all as expected")
