"""Voice activity: where a recording has speech, so that silence is not given to the speech model."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

RATE = 16_000
# The network gives one probability for each 32 ms.
FRAME = 512
# Speech goes on while its probability stays above the threshold less this.
_HYSTERESIS = 0.15
_SHORTEST_S = 0.25

Region = tuple[int, int]


@dataclass(frozen=True, slots=True)
class VoiceRules:
    """`threshold` is the probability (0 to 1) from which a frame is speech.

    A silence shorter than `silence_ms` does not end a region, and each region gets `padding_ms` of what surrounds it.
    """

    threshold: float = 0.5
    silence_ms: int = 500
    padding_ms: int = 300


def speech_regions(probabilities: Iterable[float], total: int, rules: VoiceRules) -> list[Region]:
    """Regions of speech as (first sample, sample after the last), in order and apart from each other.

    `probabilities` has one value for each frame of 512 samples of `total`, the last frame being cut short. Speech of
    less than 0.25 s is left out.
    """
    return _padded(_spoken(probabilities, total, rules), total, rules.padding_ms * RATE // 1000)


def _spoken(probabilities: Iterable[float], total: int, rules: VoiceRules) -> list[Region]:
    found: list[Region] = []
    patience = rules.silence_ms * RATE // 1000
    begin: int | None = None
    quiet_since: int | None = None
    for frame, probability in enumerate(probabilities):
        place = frame * FRAME
        if probability >= rules.threshold:
            begin, quiet_since = (place if begin is None else begin), None
        elif begin is not None and probability < rules.threshold - _HYSTERESIS:
            quiet_since = place if quiet_since is None else quiet_since
            if place + FRAME - quiet_since >= patience:
                found.append((begin, quiet_since))
                begin = quiet_since = None
    if begin is not None:
        found.append((begin, total if quiet_since is None else quiet_since))
    return [region for region in found if region[1] - region[0] >= _SHORTEST_S * RATE]


def _padded(regions: list[Region], total: int, padding: int) -> list[Region]:
    padded: list[Region] = []
    for place, (begin, end) in enumerate(regions):
        after = regions[place + 1][0] if place + 1 < len(regions) else None
        # Two regions share what lies between them.
        most = end + padding if after is None else min(end + padding, (end + after) // 2)
        least = max(padded[-1][1], begin - padding) if padded else max(0, begin - padding)
        padded.append((least, min(total, most)))
    return padded


# Silero's network for voice activity in OpenVINO, in a preparation process.
#
# Each call takes a block of frames with the state that the block before it left, so memory does not grow with the
# length.

# The network sees the end of the frame before each frame.
_CONTEXT = 64
# 16 s in one call, which takes 20 ms; the network's recurrent part runs inside of it.
_BLOCK = 512
_STATE = (1, 1, 128)
_FULL_SCALE = np.float32(32768.0)


def find_speech(pcm: str, network: str, threshold: float, silence_ms: int, padding_ms: int) -> list[Region]:
    """The regions of speech in the file `pcm`, 16-bit mono samples of 16 kHz; see `VoiceRules`, `speech_regions`."""
    rules = VoiceRules(threshold, silence_ms, padding_ms)
    return speech_regions(_probabilities(Path(pcm), _compiled(network)), Path(pcm).stat().st_size // 2, rules)


@functools.cache
def _compiled(network: str) -> Any:
    import openvino as ov  # noqa: PLC0415  (never in the edge process)

    core = ov.Core()
    # One thread: others decode and transcribe meanwhile. f32: probabilities must not depend on the processor.
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1}
    return core.compile_model(core.read_model(network), "CPU", settings).create_infer_request()


def _probabilities(pcm: Path, request: Any) -> Iterator[float]:
    hidden, cell = np.zeros(_STATE, np.float32), np.zeros(_STATE, np.float32)
    before = np.zeros(_CONTEXT, np.float32)
    with pcm.open("rb") as file:
        while data := file.read(2 * FRAME * _BLOCK):
            samples = np.frombuffer(data, "<i2").astype(np.float32) / _FULL_SCALE
            count = -(-len(samples) // FRAME)
            frames = np.zeros((count, FRAME), np.float32)
            frames.reshape(-1)[: len(samples)] = samples
            context = np.vstack((before, frames[:-1, -_CONTEXT:]))
            result = request.infer({"input": np.hstack((context, frames)), "h": hidden, "c": cell})
            hidden, cell, before = result["hn"].copy(), result["cn"].copy(), frames[-1, -_CONTEXT:].copy()
            yield from result["speech_probs"].reshape(-1).tolist()
