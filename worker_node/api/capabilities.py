"""A model's capabilities by their names in Ollama's API: tools that pick a chat model read them in lists of models."""

from __future__ import annotations

from collections.abc import Iterable

from worker_node.manager.served import ServedModel
from worker_node.models.manifest import InstalledModel
from worker_node.registry import task_of


def capabilities(installed: InstalledModel, served: ServedModel | None = None) -> list[str]:
    """`embedding` alone for a model that cannot chat; `thinking` is known only for models that were loaded before."""
    task = task_of(installed.kind)
    thinking = served is not None and "thinking" in served.abilities()
    return [*(task.listed or (task.capability,)), *(["thinking"] if thinking else [])]


def chat_first(models: Iterable[InstalledModel]) -> list[InstalledModel]:
    """The models in their order, but those that chat before all others.

    Many tools begin with the first model of a list (Open WebUI, scripts that take `data[0]`), whatever it can do.
    """
    return sorted(models, key=lambda model: "completion" not in capabilities(model))
