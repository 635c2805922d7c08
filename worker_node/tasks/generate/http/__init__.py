"""The routes of text generation in every dialect; `ollama` has Ollama's routes for models, too.

`parameters` and `conversation` hold what bodies share, `replies` is how every dialect answers.
"""

from __future__ import annotations

from worker_node.http.routes import TaskApi
from worker_node.tasks.generate.http import anthropic, native, ollama, openai, responses, tokenize
from worker_node.tasks.generate.metrics import GenerationMetrics

API = TaskApi(
    operations=(
        *native.OPERATIONS,
        *openai.OPERATIONS,
        *responses.OPERATIONS,
        *anthropic.OPERATIONS,
        *tokenize.OPERATIONS,
        *ollama.OPERATIONS,
    ),
    metrics=GenerationMetrics,
)
