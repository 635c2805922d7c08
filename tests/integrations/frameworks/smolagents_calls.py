"""smolagents: a tool-calling and a code agent with a step or two."""

import os

from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool

URL, MODEL = os.environ["NODE_URL"], os.environ.get("NODE_MODEL", "smollm2")


@tool
def double(number: int) -> int:
    """Double a number.

    Args:
        number: the number
    """
    return 2 * number


model = OpenAIServerModel(model_id=MODEL, api_base=URL + "/v1", api_key="unused", max_tokens=100)
for make in (ToolCallingAgent, CodeAgent):
    agent = make(tools=[double], model=model, max_steps=2, verbosity_level=0)
    assert agent.run("What is two times 21?") is not None
    assert not [step.error for step in agent.memory.steps if getattr(step, "error", None) and "400" in str(step.error)]
print("all as expected")
