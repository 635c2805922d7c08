"""The welcome text of `npu-node serve` when it listens."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worker_node.manager.served import ServedModel
    from worker_node.node import Node


def welcome(url: str, node: Node) -> str:
    """Addresses, a call to try, and the models with their state."""
    url = _reachable(url)
    key = " -H 'Authorization: Bearer KEY'" if node.settings.api_keys else ""
    manager = node.manager
    rows = [(model.id, _state(model)) for model in manager.models]
    rows += [(model.name, f"failed: {model.reason}") for model in manager.failed]
    width = max((len(name) for name, _ in rows), default=0)
    models = [f"  {name.ljust(width)}  {state}" for name, state in rows]
    return "\n".join(
        [
            f"  dashboard  {url}/dashboard",
            f"  API        {url}/docs   (OpenAI: {url}/v1, Ollama: {url})",
            f"""  try        curl {url}/embeddings{key} -d '{{"texts": ["hello"]}}'""",
            "models:",
            *(models or ["  none configured; a request for an installed model loads it"]),
        ]
    )


def _state(model: ServedModel) -> str:
    preferred = model.placements[0]
    emulated = ", emulated" if preferred.emulated else ""
    return f"{model.state().value} on {preferred.device}{emulated}"


def _reachable(url: str) -> str:
    """An address that can be called: a node on all of them is called by loopback here."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
