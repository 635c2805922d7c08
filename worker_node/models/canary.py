"""Known answers by which a device proves that it computes a model rightly before the model is called ready.

A device that answers garbage raises no error, so each model carries a small examination: texts with the
vectors that the CPU gave in float32 at conversion, or a prompt with what its greedy answer must contain."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from worker_node.core.errors import ConfigurationError

CANARY_FILE = "canary.json"

# Short, so that the examination takes milliseconds; different in script, length and meaning, so that a device
# which ignores its input, its mask or the tail of a text cannot pass.
CANARY_TEXTS = (
    "A cat sits on the mat.",
    "Quarterly revenue rose by 12% to €4.2 billion.",
    "東京は日本の首都です。",
    "The quick brown fox jumps over the lazy dog while seven wizards quietly box up the last of the jugs.",
    "ok",
)
# bf16 on the CPU stays above 0.9999 and f16 on an NPU above 0.999; garbage is below 0.5.
MIN_COSINE = 0.995


@dataclass(frozen=True, slots=True)
class EmbeddingCanary:
    """Texts and their unit vectors (float32 values, one row a text); each cosine must reach `min_cosine`."""

    texts: tuple[str, ...]
    vectors: tuple[tuple[float, ...], ...]
    min_cosine: float = MIN_COSINE


@dataclass(frozen=True, slots=True)
class GenerationCanary:
    """A user message; the greedy answer must contain each of `expected`, upper or lower case alike."""

    prompt: str
    expected: tuple[str, ...]
    max_new_tokens: int = 24

    def accepts(self, answer: str) -> bool:
        """Whether the answer to the prompt is what the model is known to say."""
        return all(part.lower() in answer.lower() for part in self.expected)


Canary = EmbeddingCanary | GenerationCanary


def write_embedding_canary(directory: Path, canary: EmbeddingCanary) -> None:
    """Store an examination beside the model that it was made from."""
    (directory / CANARY_FILE).write_bytes(msgspec.json.encode(canary))


def read_embedding_canary(directory: Path) -> EmbeddingCanary:
    """Load the examination of an embedding model.

    Raises ConfigurationError, naming the file, when it is missing or damaged.
    """
    path = directory / CANARY_FILE
    try:
        canary = msgspec.json.decode(path.read_bytes(), type=EmbeddingCanary)
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise ConfigurationError(
            f"{path}: not a readable canary ({error}); remove the model and pull it again"
        ) from error
    if not canary.texts or len(canary.texts) != len(canary.vectors):
        raise ConfigurationError(f"{path}: {len(canary.texts)} texts but {len(canary.vectors)} vectors; pull it again")
    return canary
