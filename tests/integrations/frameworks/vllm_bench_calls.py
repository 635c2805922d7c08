"""`vllm bench serve`, the load generator of vLLM: chat and completions with streams; every request must be answered."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

URL, MODEL, TOKENIZER = os.environ["NODE_URL"], os.environ.get("NODE_MODEL", "smollm2"), os.environ["TOKENIZER"]
VLLM = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve"]

for backend, endpoint in (("openai-chat", "/v1/chat/completions"), ("openai", "/v1/completions")):
    with tempfile.TemporaryDirectory() as directory:
        command = [*VLLM, "--backend", backend, "--base-url", URL, "--endpoint", endpoint]
        command += ["--model", MODEL, "--tokenizer", TOKENIZER, "--dataset-name", "random", "--ignore-eos"]
        command += ["--random-input-len", "32", "--random-output-len", "16", "--num-prompts", "8"]
        command += ["--max-concurrency", "4", "--disable-tqdm"]
        command += ["--save-result", "--result-dir", directory, "--result-filename", "result.json"]
        subprocess.run(command, check=True)
        result = json.loads((Path(directory) / "result.json").read_text())
        assert result["completed"] == 8, result
        assert result["total_output_tokens"] == 8 * 16, result["total_output_tokens"]
print("all as expected")
