"""llm (the command line tool): prompt, schema, tools and conversation with extra-openai-models.yaml."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

URL, MODEL = os.environ["NODE_URL"], os.environ.get("NODE_MODEL", "smollm2")
with tempfile.TemporaryDirectory() as home:
    (Path(home) / "extra-openai-models.yaml").write_text(
        f"- {{model_id: node, model_name: {MODEL}, api_base: {URL}/v1, supports_schema: true, supports_tools: true}}\n"
    )
    env = os.environ | {"LLM_USER_PATH": home, "OPENAI_API_KEY": "unused"}
    llm = Path(sys.executable).parent / "llm"

    def run(*arguments):
        return subprocess.run([llm, *arguments], env=env, check=True, capture_output=True, text=True).stdout

    assert run("-m", "node", "What is the capital of France?", "-o", "max_tokens", "50")
    assert run("-m", "node", "-c", "And of Italy?", "-o", "max_tokens", "50", "--no-stream")
    assert (
        run("-m", "node", "--schema", "name, age int", "Ana is 30.", "-o", "max_tokens", "80").strip().startswith("{")
    )
    run("-m", "node", "-T", "llm_time", "What time is it?", "-o", "max_tokens", "50", "--chain-limit", "2")
print("all as expected")
