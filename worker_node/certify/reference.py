"""How a CPU judges an answer: a process of its own, with OpenVINO alone and at full precision.

    python -m worker_node.certify.score MODEL.xml

Reads a JSON array on each line, [tokens, count], and writes one: for each of the last `count` tokens, how much
likelier (natural logarithm) the most likely token was than the one that stands there; 0: greedy decoding takes it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from worker_node.core.environment import native_environment
from worker_node.core.errors import NodeError
from worker_node.models.directory import MODEL_FILE

# Logits of a whole long prompt would need gigabytes.
_CHUNK = 128


class NotScored(NodeError):
    """The CPU cannot judge the model's answers; the text says why."""


class Scorer:
    """The process, started at the first answer."""

    def __init__(self, directory: Path) -> None:
        self._model = directory / MODEL_FILE
        self._process: subprocess.Popen[str] | None = None

    def margins(self, tokens: list[int], count: int) -> list[float]:
        """Those of the last `count` tokens. Raises NotScored."""
        if not self._model.is_file():
            raise NotScored("only models in OpenVINO form can be compared with the CPU")
        if self._process is None:
            self._process = subprocess.Popen(  # noqa: S603  (ours)
                [sys.executable, "-m", __name__, str(self._model)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=native_environment(),
                text=True,
            )
        assert self._process.stdin is not None  # noqa: S101
        assert self._process.stdout is not None  # noqa: S101
        try:
            self._process.stdin.write(json.dumps([tokens, count]) + "\n")
            self._process.stdin.flush()
            found: list[float] = json.loads(self._process.stdout.readline())
        except (OSError, ValueError):
            raise NotScored("the CPU that judges answers failed; its message is above") from None
        return found

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    stream.close()


def _main(model: str) -> None:
    import numpy as np  # noqa: PLC0415  (as OpenVINO: this process alone needs them)
    import openvino as ov  # noqa: PLC0415

    exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    request = ov.Core().compile_model(model, "CPU", exact).create_infer_request()
    names = {name for port in request.model_inputs for name in port.get_names()}
    for line in sys.stdin:
        tokens, count = json.loads(line)
        request.reset_state()
        margins: list[float] = []
        first = len(tokens) - count
        for begin in range(0, len(tokens) - 1, _CHUNK):
            part = tokens[begin : min(begin + _CHUNK, len(tokens) - 1)]
            given: dict[str, Any] = {
                "input_ids": np.array([part], np.int64),
                "attention_mask": np.ones((1, begin + len(part)), np.int64),
                "position_ids": np.arange(begin, begin + len(part), dtype=np.int64)[None],
                "beam_idx": np.zeros(1, np.int32),
            }
            logits = request.infer({name: value for name, value in given.items() if name in names})[0][0]
            for row, at in enumerate(range(begin + 1, begin + len(part) + 1)):
                if at >= first:
                    margins.append(float(logits[row].max() - logits[row][tokens[at]]))
        print(json.dumps(margins), flush=True)


if __name__ == "__main__":
    _main(sys.argv[1])
