"""LangChain and LangGraph: structured output by all three methods, forced tools, a prebuilt agent with memory."""

import os

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphRecursionError
from pydantic import BaseModel, Field

URL, MODEL = os.environ["NODE_URL"], os.environ.get("NODE_MODEL", "smollm2")


class Part(BaseModel):
    name: str = Field(max_length=20)
    price: float


class Order(BaseModel):
    """An order."""

    parts: list[Part] = Field(min_length=1, max_length=2)
    express: bool = False


@tool
def stock(part: Part, warehouse: str = "north") -> int:
    """How many of a part are in stock."""
    return 3


openai = {"base_url": URL + "/v1", "api_key": "unused", "model": MODEL, "max_retries": 0}
for llm in (
    ChatOpenAI(max_tokens=160, temperature=0, **openai),
    ChatOpenAI(max_tokens=160, temperature=0, use_responses_api=True, **openai),
    ChatOllama(base_url=URL, model=MODEL, num_predict=160, temperature=0),
):
    for method in ("json_schema", "function_calling"):
        if method == "function_calling" and isinstance(llm, ChatOllama):
            continue  # Ollama has no tool_choice, so nothing holds a small model to a call
        assert isinstance(llm.with_structured_output(Order, method=method).invoke("Two bolts at 1.50."), Order), method
    assert llm.bind_tools([stock]).invoke("How many bolts are there?") is not None
    assert list(llm.stream("Count to three."))
    for extra in ({}, {"response_format": Order}):
        agent = create_agent(llm, tools=[stock], checkpointer=InMemorySaver(), **extra)
        thread = {"configurable": {"thread_id": "1"}, "recursion_limit": 6}
        try:
            for text in ("How many bolts are there?", "And nuts?"):
                agent.invoke({"messages": [{"role": "user", "content": text}]}, thread)
        except (GraphRecursionError, ValueError):
            pass  # what a small model makes of it is its own affair
forced = ChatOpenAI(max_tokens=160, **openai).bind_tools([stock], tool_choice="stock", strict=True)
assert forced.invoke("How many bolts are there?").tool_calls
print("all as expected")
