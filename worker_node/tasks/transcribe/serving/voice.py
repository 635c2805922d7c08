"""Whether silence is skipped in a request, and by which rules: the request's own, or the model's options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from worker_node.core.errors import ConfigurationError, ModelNotFound, UnsupportedParameter
from worker_node.manager.manager import ModelManager
from worker_node.models.store import ModelStore
from worker_node.tasks.transcribe.files import VOICE_FILE, VOICE_MODEL
from worker_node.tasks.transcribe.options import AudioOptions
from worker_node.tasks.transcribe.voice.regions import VoiceRules


@dataclass(frozen=True, slots=True)
class VoiceChoice:
    """What a request says, in the field `param`; what is None is left to the model's options.

    `insist`: the request is refused where this node cannot do it.
    """

    wanted: bool | None = None
    threshold: float | None = None
    silence_ms: int | None = None
    padding_ms: int | None = None
    param: str | None = None
    insist: bool = True


@dataclass(frozen=True, slots=True)
class Voice:
    """How to find speech: `network` is the file of Silero's network."""

    network: Path
    rules: VoiceRules


def find_network(store: ModelStore) -> Path | None:
    """The network's file; None where it is not installed, or damaged."""
    try:
        path = store.get(VOICE_MODEL).path / VOICE_FILE
    except (ModelNotFound, ConfigurationError):
        return None
    return path if path.is_file() else None


async def find_voice(manager: ModelManager, limits: AudioOptions, choice: VoiceChoice, deadline: float) -> Voice | None:
    """How a request has silence skipped, None if it has not.

    Raises UnsupportedParameter where it cannot be, and what `ModelManager.look` raises.
    """
    if not (limits.vad if choice.wanted is None else choice.wanted):
        return None
    network = await manager.look(find_network, deadline)
    if network is None:
        if choice.wanted and not choice.insist:
            return None
        raise UnsupportedParameter(
            f"{choice.param or 'vad'}: voice activity cannot be detected, {VOICE_MODEL} is not installed on this node; "
            f"its operator can run: npu-node pull {VOICE_MODEL}",
            param=choice.param,
        )
    rules = VoiceRules(
        limits.vad_threshold if choice.threshold is None else choice.threshold,
        limits.vad_silence_ms if choice.silence_ms is None else choice.silence_ms,
        limits.vad_padding_ms if choice.padding_ms is None else choice.padding_ms,
    )
    return Voice(network, rules)
