"""The draft model of a generation model: found, and the options that go with it decided, before anything is loaded.

Tried with OpenVINO GenAI 2026.4.1: with a prefix cache sampled answers break its pipeline, and where a prompt is split
over steps greedy answers differ from those without a draft. Without both, answers are the same in f32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from worker_node.core.errors import ConfigurationError, ModelNotFound
from worker_node.core.types import Device, ModelKind
from worker_node.models.directory import read_directory
from worker_node.models.manifest import InstalledModel
from worker_node.models.store import ModelStore
from worker_node.serving.build import not_installed
from worker_node.settings import ModelSettings
from worker_node.tasks.generate.serving.kv_cache import kv_cache_bytes

ON_NPU = (
    "draft_model has no effect on the NPU: with a draft OpenVINO GenAI generates past the end of an answer there; "
    "place the model on CPU or GPU for it"
)
_WITHOUT = ("enable_prefix_caching", "dynamic_split_fuse")


def complete_draft(installed: InstalledModel, wanted: ModelSettings, values: dict[str, Any], store: Path) -> None:
    """Replace the name in `draft_model` by the model's directory, and set what cannot be used beside it.

    Raises ConfigurationError when there is no such model, or another option excludes it.
    """
    name = values.get("draft_model")
    if name is None:
        return
    if values.get("prompt_lookup"):
        raise wanted.error("draft_model", "draft_model and prompt_lookup both guess tokens; set one of them")
    for option in _WITHOUT:
        if values.get(option):
            raise wanted.error(
                option,
                f"{option} = true cannot be used with draft_model: OpenVINO GenAI would fail or answer wrongly; leave "
                f"{option} out",
            )
        values[option] = False
    try:
        draft = read_directory(Path(name).expanduser()) if "/" in name else ModelStore(store).get(name)
    except ModelNotFound as error:
        raise wanted.error("draft_model", f"{name} {not_installed(name, store)}") from error
    except ConfigurationError as error:
        raise wanted.error("draft_model", error.message) from error
    if draft.kind != ModelKind.GENERATION:
        raise wanted.error("draft_model", f"{name} is a model for {draft.kind}; a draft must generate text")
    if draft.path.resolve() == installed.path.resolve():
        raise wanted.error("draft_model", f"{name} is the model itself; name a smaller one")
    values["draft_model"] = str(draft.path)


def check_devices(wanted: ModelSettings) -> None:
    """Raise ConfigurationError if the model has a draft, and runs on the NPU alone."""
    places = wanted.placements
    alone = places is not None and all(place.device is Device.NPU for place in places)
    if alone and wanted.options.get("draft_model") is not None:
        raise wanted.error("draft_model", ON_NPU)


def draft_weights(directory: Path) -> int:
    """Bytes of a draft's weights."""
    return sum(path.stat().st_size for path in directory.glob("*.bin"))


def draft_cache(directory: Path, tokens: int) -> int:
    """Bytes of a draft's KV cache for so many tokens; 0 where they are not known."""
    return kv_cache_bytes(directory, tokens) or 0
