"""crewAI: an agent with a tool, a task with typed output."""

import os

os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true", "CREWAI_TRACING_ENABLED": "false"}

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool

URL, MODEL = os.environ["NODE_URL"], os.environ.get("NODE_MODEL", "smollm2")


@tool("lookup")
def lookup(word: str) -> str:
    """Look a word up."""
    return word


llm = LLM(model=f"openai/{MODEL}", base_url=URL + "/v1", api_key="unused", max_tokens=150, temperature=0.0)
assert llm.call([{"role": "user", "content": "What is the capital of France?"}])
agent = Agent(
    role="Scholar", goal="Find facts", backstory="You know much.", llm=llm, tools=[lookup], max_iter=2, verbose=False
)
task = Task(description="Tell a fact about cats.", expected_output="One fact.", agent=agent)
assert Crew(agents=[agent], tasks=[task], verbose=False).kickoff().raw is not None
print("all as expected")
