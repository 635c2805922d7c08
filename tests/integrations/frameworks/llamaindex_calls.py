"""LlamaIndex: chat, streaming, tools, structured output and embeddings, by OpenAI's and Ollama's dialects."""

import asyncio
import os

from llama_index.core import PromptTemplate
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.core.workflow.errors import WorkflowRuntimeError
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.ollama import Ollama
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

URL, MODEL = os.environ["NODE_URL"], os.environ.get("NODE_MODEL", "smollm2")


class Song(BaseModel):
    """A song."""

    title: str = Field(max_length=20)
    seconds: int = Field(ge=1, le=999)


class Album(BaseModel):
    """An album."""

    artist: str = Field(max_length=20)
    songs: list[Song] = Field(min_length=1, max_length=2)


def find_song(title: str, year: int = 2000) -> str:
    """Find a song."""
    return f"{title} is from {year}"


tool = FunctionTool.from_defaults(find_song)
question = [ChatMessage(role="user", content="Name an album by Queen.")]
openai_like = OpenAILike(
    api_base=URL + "/v1",
    api_key="unused",
    model=MODEL,
    is_chat_model=True,
    is_function_calling_model=True,
    context_window=8192,
    max_tokens=200,
    max_retries=0,
    timeout=100,
    should_use_structured_outputs=True,
)
ollama = Ollama(
    base_url=URL, model=MODEL, request_timeout=100, context_window=2048, additional_kwargs={"num_predict": 200}
)
for llm in (openai_like, ollama):
    assert llm.chat(question).message.content
    assert list(llm.stream_chat(question))
    assert llm.complete("Once upon a time").text is not None
    assert isinstance(llm.structured_predict(Album, PromptTemplate("Name an album.")), Album)
    llm.chat_with_tools([tool], user_msg="Find the song Bohemian Rhapsody.")
openai_like.chat_with_tools([tool], user_msg="Find a song.", tool_required=True)


async def agent():
    worker = FunctionAgent(tools=[tool], llm=openai_like, system_prompt="Use tools.")
    try:
        await worker.run("Find the song Imagine.", max_iterations=3)
    except WorkflowRuntimeError:
        pass


asyncio.run(agent())
vectors = OpenAILikeEmbedding(api_base=URL + "/v1", api_key="unused", model_name="all-minilm")
assert vectors.get_text_embedding("a text")
assert len(vectors.get_text_embedding_batch(["a text", "another"])) == 2
print("all as expected")
