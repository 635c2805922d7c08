"""The sizes of a Whisper network, by the names of OpenAI's checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

# Vocabulary sizes: English-only checkpoints have 51,864 tokens, multilingual ones 51,865, large-v3 51,866.
_FIRST_MULTILINGUAL = 51865
_LANGUAGES_BEGIN = 51765


@dataclass(frozen=True, slots=True)
class Dimensions:
    """Layer counts and widths; `n_audio_ctx` counts encoder positions for 30 s of audio."""

    n_mels: int
    n_audio_ctx: int
    n_audio_state: int
    n_audio_head: int
    n_audio_layer: int
    n_vocab: int
    n_text_ctx: int
    n_text_state: int
    n_text_head: int
    n_text_layer: int

    @property
    def multilingual(self) -> bool:
        """Whether the model knows languages and tasks; an English-only model accepts neither."""
        return self.n_vocab >= _FIRST_MULTILINGUAL

    @property
    def languages(self) -> int:
        """How many language tokens the vocabulary has."""
        return self.n_vocab - _LANGUAGES_BEGIN - int(self.multilingual)
