"""Silero's network for voice activity in OpenVINO, in a preparation process.

Each call takes a block of frames with the state that the block before it left, so memory does not grow with the length.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov

from worker_node.tasks.transcribe.voice.regions import FRAME, Region, VoiceRules, speech_regions

# The network sees the end of the frame before each frame.
_CONTEXT = 64
# 16 s in one call, which takes 20 ms; the network's recurrent part runs inside of it.
_BLOCK = 512
_STATE = (1, 1, 128)
_FULL_SCALE = np.float32(32768.0)


def find_speech(pcm: str, network: str, rules: VoiceRules) -> list[Region]:
    """The regions of speech in the file `pcm`, 16-bit mono samples of 16 kHz; see `regions.speech_regions`."""
    return speech_regions(_probabilities(Path(pcm), _compiled(network)), Path(pcm).stat().st_size // 2, rules)


@functools.cache
def _compiled(network: str) -> Any:
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
