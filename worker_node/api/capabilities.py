"""What a model can do, in the words of Ollama's API: tools that pick a chat model read them in lists of models."""

from __future__ import annotations

from worker_node.manager.served import ServedModel
from worker_node.models.manifest import InstalledModel
from worker_node.registry import task_of
from worker_node.serving.models import GenerationModel


def capabilities(installed: InstalledModel, served: ServedModel | None = None) -> list[str]:
    """`embedding` alone for a model that cannot chat; `thinking` is known of models that were loaded once."""
    task = task_of(installed.kind)
    thinking = isinstance(served, GenerationModel) and served.tokenizer.can_think
    return [*(task.listed or (task.capability,)), *(["thinking"] if thinking else [])]
