"""What a device's answers are compared with: those of a CPU at full precision.

They come with the package for the models of the catalog that this project can run (`references/`), from a file that
--make-reference wrote, or from this machine's CPU. A passport says from where, so that a wrong CPU confirms no wrong
NPU unnoticed.

    python -m worker_node.certify.reference MODEL.xml

is the process that continues prompts with OpenVINO alone: GenAI's pipelines tell the probability of no token but the
chosen one.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from worker_node.certify import inputs
from worker_node.certify.nodes import CallFailed, RunningNode
from worker_node.core.environment import native_environment
from worker_node.core.errors import ConfigurationError
from worker_node.core.operating_system import tethered

# Tokens of each answer that are compared, and how many of the likeliest tokens are known at each of them.
ANSWER_TOKENS = 12
_LIKELIEST = 20
# Logits of a whole long prompt would need gigabytes.
_CHUNK = 128
_MOST_BYTES = 100_000_000

# At each token of an answer: the likeliest tokens and the natural logarithms of their probabilities, the likeliest
# first. The first of each row are the answer of a greedy search.
Continuation = list[tuple[list[int], list[float]]]


T = TypeVar("T")


class Reference:
    """Answers of a CPU to what `worker_node.certify.inputs` sends. Methods raise CallFailed.

    Those that are not `stored` are made here when they are first needed: by `start`ing a node on the CPU or, for
    prompts, by a process with the model's graph.
    """

    def __init__(self, key: str, start: Callable[[], RunningNode], graph: Path, stored: dict[str, Any]) -> None:
        self._key = key
        self._start = start
        self._graph = graph
        self._stored = frozenset(stored)
        self._answers = dict(stored)
        self._asked: set[str] = set()
        self._node: RunningNode | None = None
        self._process: subprocess.Popen[str] | None = None

    def close(self) -> None:
        if self._node is not None:
            self._node.close()
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    @property
    def origin(self) -> str:
        made_here = self._asked - self._stored
        if not made_here:
            return "stored" if self._asked else "nothing"
        if made_here == self._asked:
            return "this CPU"
        return f"stored, and this CPU for {len(made_here)} of {len(self._asked)} answers"

    def continuation(self, prompt: list[int]) -> Continuation:
        return self._answer(["continuation", prompt], lambda: self._continue(prompt), Continuation)

    def vector(self, text: str) -> npt.NDArray[np.float32]:
        encoded = self._answer(
            ["vector", text], lambda: self._on_cpu().vectors([text])[0].astype("<f2").tobytes(), bytes
        )
        return np.frombuffer(encoded, "<f2").astype(np.float32)

    def scores(self, query: str, documents: Sequence[str]) -> list[float]:
        question = ["scores", query, list(documents)]
        return self._answer(question, lambda: self._on_cpu().scores(query, documents), list[float])

    def transcript(self, recording: bytes) -> str:
        digest = hashlib.sha256(recording).hexdigest()
        return self._answer(["transcript", digest], lambda: self._on_cpu().transcript(recording), str)

    def description(self, image: str) -> str:
        return self._answer(["description", image], lambda: self._on_cpu().description(image), str)

    def make(self) -> None:
        """Ask the CPU everything of which a certification may want the answer, but prompts of unusual lengths."""
        model, node = self._on_cpu().model(), self._on_cpu()
        window = model["context_limit"]
        match model["kind"]:
            case "generation":
                for length in inputs.LENGTHS:
                    if length + ANSWER_TOKENS < window:
                        self.continuation(inputs.prompt(length, 0, node.tokenize))
            case "embedding":
                for text in inputs.texts(window, sys.maxsize):
                    self.vector(text)
            case "rerank":
                for query in inputs.RANKED:
                    self.scores(query, inputs.DOCUMENTS)
            case "transcription":
                for recording in inputs.recordings():
                    self.transcript(recording)
            case "vision":
                for image in inputs.images():
                    self.description(image)

    def save(self, path: Path) -> None:
        """Write the answers, for `--reference` on another machine. Raises ConfigurationError."""
        content = json.dumps({"key": self._key, "answers": self._answers}, sort_keys=True, separators=(",", ":"))
        try:
            # No time of day in it: equal answers make equal files.
            path.write_bytes(gzip.compress(content.encode(), mtime=0))
        except OSError as error:
            raise ConfigurationError(f"the reference cannot be written to {path}: {error.strerror}") from None

    def _answer(self, question: list[Any], ask: Callable[[], T], form: type[T]) -> T:
        digest = hashlib.sha256(json.dumps(question).encode()).hexdigest()[:32]
        if digest not in self._answers:
            # As a file holds it: bytes are base64.
            self._answers[digest] = msgspec.to_builtins(ask())
        self._asked.add(digest)
        try:
            return msgspec.convert(self._answers[digest], form)
        except msgspec.ValidationError as error:
            raise ConfigurationError(
                f"the reference must hold an answer to {question[0]}, and is damaged: {error}"
            ) from None

    def _on_cpu(self) -> RunningNode:
        if self._node is None:
            self._node = self._start()
        return self._node

    def _continue(self, prompt: list[int]) -> Continuation:
        if not self._graph.is_file():
            raise CallFailed(f"prompts are compared only for models in OpenVINO's form, and {self._graph} is missing")
        if self._process is None:
            self._process = subprocess.Popen(  # noqa: S603  (ours)
                tethered([sys.executable, "-m", __name__, str(self._graph)]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=native_environment(),
                text=True,
            )
        assert self._process.stdin is not None  # noqa: S101
        assert self._process.stdout is not None  # noqa: S101
        try:
            self._process.stdin.write(json.dumps(prompt) + "\n")
            self._process.stdin.flush()
            answer: Continuation = json.loads(self._process.stdout.readline())
        except (OSError, ValueError):
            raise CallFailed("the model's graph could not be run on the CPU; its message is above") from None
        return answer


def shipped_reference(model: str, key: str) -> dict[str, Any]:
    """The answers that come with the package for a model; none where they are of other weights or another OpenVINO."""
    file = files(__package__).joinpath("references", f"{model}.json.gz")
    content = json.loads(gzip.decompress(file.read_bytes())) if file.is_file() else {}
    return dict(content["answers"]) if content.get("key") == key else {}


def read_reference(path: Path, key: str) -> dict[str, Any]:
    """The answers of a file that --make-reference wrote. Raises ConfigurationError."""
    try:
        with gzip.open(path) as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ConfigurationError(f"{path} must hold at most {_MOST_BYTES} bytes")
        found = json.loads(content)
        theirs, answers = found["key"], dict(found["answers"])
    except (OSError, EOFError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigurationError(f"{path} must be a file that --make-reference wrote; it is not: {error}") from None
    if theirs != key:
        raise ConfigurationError(
            f"{path} must hold answers for {key} (weights, OpenVINO), got answers for {theirs}; leave --reference out "
            "to compare with this machine's CPU"
        )
    return answers


def _main(graph: str) -> None:
    import openvino as ov  # noqa: PLC0415  (this process alone needs it)

    exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    request = ov.Core().compile_model(graph, "CPU", exact).create_infer_request()
    names = {name for port in request.model_inputs for name in port.get_names()}

    def logits_after(tokens: list[int], past: int) -> npt.NDArray[np.float32]:
        given: dict[str, Any] = {
            "input_ids": np.array([tokens], np.int64),
            "attention_mask": np.ones((1, past + len(tokens)), np.int64),
            "position_ids": np.arange(past, past + len(tokens), dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        logits: npt.NDArray[np.float32] = request.infer({k: v for k, v in given.items() if k in names})[0][0, -1]
        return logits

    for line in sys.stdin:
        prompt: list[int] = json.loads(line)
        request.reset_state()
        for begin in range(0, len(prompt), _CHUNK):
            logits = logits_after(prompt[begin : begin + _CHUNK], begin)
        answer: Continuation = []
        while len(answer) < ANSWER_TOKENS:
            likeliest = np.argsort(-logits, kind="stable")[:_LIKELIEST]
            shifted = logits - logits.max()
            logarithms = shifted[likeliest] - np.log(np.exp(shifted).sum())
            answer.append((likeliest.tolist(), [round(float(value), 4) for value in logarithms]))
            logits = logits_after([int(likeliest[0])], len(prompt) + len(answer) - 1)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _main(sys.argv[1])
