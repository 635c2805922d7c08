"""Haystack: chat generator with tools, typed output and streaming; an agent; text and document embedders."""

import os
from typing import Literal

from haystack import Document
from haystack.components.agents import Agent
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret
from pydantic import BaseModel, Field

URL, MODEL = os.environ["NODE_URL"], os.environ.get("NODE_MODEL", "smollm2")
common = {"api_key": Secret.from_token("unused"), "api_base_url": URL + "/v1", "max_retries": 0}


class Book(BaseModel):
    title: str = Field(max_length=20)
    year: int = Field(ge=0, le=2100)


# Constants, as a small model may write a free text until its tokens are spent.
def lookup(title: Literal["Ulysses", "Emma"], author: Literal["Joyce", "Austen", "unknown"] = "unknown") -> str:
    """Look a book up."""
    return f"{title} by {author} is on shelf 3"


tool = create_tool_from_function(lookup)
ask = [ChatMessage.from_system("Be brief."), ChatMessage.from_user("Where is Ulysses?")]
plain = OpenAIChatGenerator(model=MODEL, generation_kwargs={"max_tokens": 100}, **common)
first = plain.run(ask)["replies"]
assert plain.run([*ask, *first, ChatMessage.from_user("And Emma?")])["replies"]
pieces = []
OpenAIChatGenerator(model=MODEL, streaming_callback=pieces.append, generation_kwargs={"max_tokens": 50}, **common).run(
    ask
)
assert pieces
typed = OpenAIChatGenerator(model=MODEL, generation_kwargs={"max_tokens": 100, "response_format": Book}, **common)
Book.model_validate_json(typed.run(ask)["replies"][0].text)
forced = {"max_tokens": 100, "tool_choice": "required"}
assert (
    OpenAIChatGenerator(model=MODEL, tools=[tool], generation_kwargs=forced, **common).run(ask)["replies"][0].tool_calls
)
Agent(chat_generator=plain, tools=[tool], max_agent_steps=2).run(messages=ask)
assert OpenAITextEmbedder(model="all-minilm", **common).run("a text")["embedding"]
assert OpenAIDocumentEmbedder(model="all-minilm", **common).run([Document(content="a text")])["documents"][0].embedding
print("all as expected")
