"""Which model the profile serves, and the model as it is built for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from worker_node.bounded.settings import PROMPT_TOKENS, DeviceLock, bounded_model
from worker_node.core.errors import ConfigurationError, ModelNotFound
from worker_node.core.types import ModelKind
from worker_node.engines.process import Canary
from worker_node.engines.protocol import JobEngine
from worker_node.models.directory import InstalledModel, read_directory
from worker_node.models.store import ModelStore
from worker_node.serving.build import Machine, build_model
from worker_node.tasks.generate.model import GenerationModel

REFERENCE_MODEL = "qwen2.5-1.5b-instruct"
SMALL_MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True)
class Choice:
    """The model directory, why it is this one, and the model in it; None with the `problem` where there is none."""

    path: Path
    why: str
    installed: InstalledModel | None
    problem: str | None = None


def choose_model(given: Path | None, store: ModelStore) -> Choice:
    """Return the model of `OV_GENAI_NPU_MODEL`, else the reference model of the store, else its small embedded one."""
    if given is not None:
        return _read(given.expanduser(), "OV_GENAI_NPU_MODEL")
    for name, why in ((REFERENCE_MODEL, "the reference model"), (SMALL_MODEL, "the reference model is not installed")):
        try:
            path = store.get(name).path
        except ModelNotFound:
            continue
        except ConfigurationError as error:
            return Choice(store.root / name, why, None, error.message)
        return _read(path, why)
    return Choice(
        store.root / REFERENCE_MODEL,
        "the reference model",
        None,
        f"no model is installed: run npu-node pull {REFERENCE_MODEL}, or set OV_GENAI_NPU_MODEL to a model directory",
    )


def reservation(choice: Choice) -> str | None:
    """What to report at start-up when the model is not the one that the jobs were accepted with."""
    if choice.installed is None or choice.installed.id == REFERENCE_MODEL:
        return None
    return (
        f"{choice.installed.id} is not the reference model {REFERENCE_MODEL}: the quality and times of the jobs were "
        f"accepted for that one alone; run npu-node pull {REFERENCE_MODEL}, or unset OV_GENAI_NPU_MODEL"
    )


def _read(path: Path, why: str) -> Choice:
    if not path.is_dir():
        return Choice(path, why, None, f"{path} is not a directory; set OV_GENAI_NPU_MODEL to a model directory")
    try:
        installed = read_directory(path)
    except ConfigurationError as error:
        return Choice(path, why, None, error.message)
    if installed.kind != ModelKind.GENERATION:
        return Choice(path, why, None, f"{path} holds a model that embeds; the jobs need one that generates text")
    if installed.context_limit < PROMPT_TOKENS:
        problem = (
            f"{path}: the model's context holds {installed.context_limit} tokens, and the jobs need {PROMPT_TOKENS}; "
            "set OV_GENAI_NPU_MODEL to another model directory"
        )
        return Choice(path, why, None, problem)
    return Choice(path, why, installed)


def build(
    choice: Choice, machine: Machine, lock: DeviceLock, blobs: Path | None = None, *, examined: bool
) -> list[GenerationModel]:
    """The chosen model on the NPU alone, or nothing where there is none.

    With `examined` the engine is ready only after its known answers, which wait for the lock as every generation does.
    Raises ConfigurationError.
    """
    if choice.installed is None:
        return []
    installed = choice.installed if examined else replace(choice.installed, canary=None)

    def guard(canary: Canary) -> Canary:
        async def locked(engine: JobEngine) -> None:
            async with lock.held():
                await canary(engine)

        return locked

    model = build_model(installed, bounded_model(installed.id, blobs), machine, guard)
    return [model] if isinstance(model, GenerationModel) else []
