"""semantic-kernel: chat completion with plugins, typed output, streaming; the Responses agent with a thread."""

import asyncio
import os

from openai import AsyncOpenAI
from pydantic import BaseModel, Field
from semantic_kernel import Kernel
from semantic_kernel.agents import ChatCompletionAgent, OpenAIResponsesAgent
from semantic_kernel.connectors.ai import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import (
    OpenAIChatCompletion,
    OpenAIChatPromptExecutionSettings,
    OpenAITextEmbedding,
)
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function

URL, MODEL = os.environ["NODE_URL"], os.environ.get("NODE_MODEL", "smollm2")
client = AsyncOpenAI(base_url=URL + "/v1", api_key="unused", max_retries=0)


class Dish(BaseModel):
    name: str = Field(max_length=20)
    price: float


class Menu:
    @kernel_function(description="The price of a dish.")
    def price(self, dish: str, currency: str = "EUR") -> str:
        return f"{dish} costs 9.99 {currency}"


async def main():
    service = OpenAIChatCompletion(ai_model_id=MODEL, async_client=client)
    history = ChatHistory(system_message="Be brief.")
    history.add_user_message("What is the capital of France?")
    settings = OpenAIChatPromptExecutionSettings(max_tokens=100, temperature=0.0)
    answer = await service.get_chat_message_content(history, settings)
    assert answer.content
    history.add_message(answer)
    history.add_user_message("And of Italy?")
    assert [piece async for piece in service.get_streaming_chat_message_content(history, settings)]
    typed = OpenAIChatPromptExecutionSettings(max_tokens=100, response_format=Dish)
    Dish.model_validate_json((await service.get_chat_message_content(history, typed)).content)
    kernel = Kernel()
    kernel.add_plugin(Menu(), "menu")
    for choice in (
        FunctionChoiceBehavior.Auto(maximum_auto_invoke_attempts=1),
        FunctionChoiceBehavior.Required(maximum_auto_invoke_attempts=1),
    ):
        tools = OpenAIChatPromptExecutionSettings(max_tokens=100, function_choice_behavior=choice)
        await service.get_chat_message_content(history, tools, kernel=kernel)
    agent = ChatCompletionAgent(service=service, name="chef", instructions="Be brief.", plugins=[Menu()])
    assert (await agent.get_response("How much is the soup?")).content is not None
    responses = OpenAIResponsesAgent(ai_model_id=MODEL, client=client, name="chef", instructions="Be brief.")
    first = await responses.get_response("What is a soup?")
    assert first.content is not None
    assert (await responses.get_response("And a stew?", thread=first.thread)).content is not None
    vectors = OpenAITextEmbedding(ai_model_id="all-minilm", async_client=client)
    assert len(await vectors.generate_embeddings(["a text", "another"])) == 2


asyncio.run(main())
print("all as expected")
