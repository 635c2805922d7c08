"""The routes of text generation: `native`, `openai` (chat, completions), `responses`, `anthropic`, `ollama` (with its
routes for models), and vLLM's `tokenize`.

`parameters` says which parameter of each dialect is which field of `Sampling`, and holds with `conversation` what the
bodies of OpenAI's routes share; `replies` is how every dialect answers.
"""

from __future__ import annotations

from worker_node.http.task import TaskApi
from worker_node.tasks.generate.http import anthropic, native, ollama, openai, responses, tokenize
from worker_node.tasks.generate.metrics import declare_generation_metrics

API = TaskApi(
    operations=(
        *native.OPERATIONS,
        *openai.OPERATIONS,
        *responses.OPERATIONS,
        *anthropic.OPERATIONS,
        *tokenize.OPERATIONS,
        *ollama.OPERATIONS,
    ),
    metrics=declare_generation_metrics,
)
