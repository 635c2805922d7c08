"""The tokens of a Whisper model: byte pairs, special tokens, and the tokens that transcription suppresses."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import openvino as ov
from openvino_tokenizers.constants import UTF8ReplaceMode
from openvino_tokenizers.tokenizer_pipeline import (
    BPETokenizationStep,
    CombineSegmentsStep,
    FuseStep,
    PaddingStep,
    RegexSplitStep,
    Sequence,
    SpecialToken,
    SpecialTokensSplit,
    TokenizerPipeline,
    TruncationStep,
    UTF8ValidateStep,
    VocabDecoderStep,
)
from openvino_tokenizers.utils import change_inputs_type, change_outputs_type
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from worker_node.core.errors import ConversionFailed

# In the order of their tokens, which follow <|startoftranscript|>.
_LANGUAGES = (
    "en zh de es ru ko fr ja pt tr pl ca nl ar sv it id hi fi vi he uk el ms cs ro da hu ta no th ur hr bg "
    "lt la mi ml cy sk te fa lv bn sr az sl kn et mk br eu is hy ne mn bs kk sq sw gl mr pa si km sn yo so "
    "af oc ka be tg sd gu am yi lo uz fo ht ps tk nn mt sa lb my bo tl mg as tt haw ln ha ba jw su yue"
)
LANGUAGES = tuple(_LANGUAGES.split())

_TIMESTAMPS = 1501
_SYMBOLS = [
    *'"#()*+/:;<=>@[\\]^_`{|}~「」『』',
    *("<<", ">>", "<<<", ">>>", "--", "---", "-(", "-[", "('", '("', "((", "))", "(((", ")))", "[[", "]]", "{{", "}}"),
    *("♪♪", "♪♪♪"),
]
_NOTES = frozenset("♩♪♫♬♭♮♯")


@dataclass(frozen=True)
class Vocabulary:
    """`tokens` by id, special ones included; `merges` in the order of their ranks; `special` by their text."""

    tokens: list[bytes]
    merges: list[tuple[bytes, bytes]]
    special: dict[str, int]

    def id_of(self, text: str) -> int:
        """The id of a special token; raises ConversionFailed when there is none."""
        try:
            return self.special[text]
        except KeyError as error:
            raise ConversionFailed(f"the tokenizer has no token {text}; a Whisper tokenizer has") from error

    @cached_property
    def end(self) -> int:
        """The token that ends a transcript."""
        return self.id_of("<|endoftext|>")

    @cached_property
    def no_speech(self) -> int:
        """The token that says that nobody speaks; HF's files call it <|nocaptions|>."""
        found = self.special.get("<|nospeech|>")
        return self.id_of("<|nocaptions|>") if found is None else found

    def languages(self) -> dict[str, int]:
        """Language tokens (`<|en|>`) with their ids."""
        names = (f"<|{language}|>" for language in LANGUAGES)
        return {name: self.special[name] for name in names if name in self.special}

    def suppressed(self) -> list[int]:
        """Tokens that no transcript contains: annotations of what is not speech, and control tokens.

        The set of OpenAI's decoder (`suppress_tokens="-1"`), which the checkpoint does not carry.
        """
        encoder = self._encoder()
        found = {encoder.encode(" -").ids[0], encoder.encode(" '").ids[0]}
        for symbol in (*_SYMBOLS, *_NOTES):
            for text in (symbol, f" {symbol}"):
                ids = encoder.encode(text).ids
                if len(ids) == 1 or symbol in _NOTES:
                    found.add(ids[0])
        control = ("startoftranscript", "translate", "transcribe", "startoflm", "startofprev")
        return sorted(found | {self.id_of(f"<|{name}|>") for name in control} | {self.no_speech})

    def suppressed_at_begin(self) -> list[int]:
        """Tokens that no transcript begins with: a blank, and its end."""
        return [*self._encoder().encode(" ").ids[:1], self.end]

    def _encoder(self) -> Tokenizer:
        as_text = _bytes_as_text()
        spelled = {
            bytes_to_text(token, as_text): i for i, token in enumerate(self.tokens) if i not in self._special_ids
        }
        merges = [(bytes_to_text(left, as_text), bytes_to_text(right, as_text)) for left, right in self.merges]
        tokenizer = Tokenizer(models.BPE(vocab=spelled, merges=merges))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(self.special.values())


def read_tiktoken(path: Path, languages: int) -> Vocabulary:
    """Read `gpt2.tiktoken` or `multilingual.tiktoken` as openai-whisper ships them; `languages` says how many tokens.

    Raises ConversionFailed when the file is damaged.
    """
    try:
        lines = [line.split() for line in path.read_text(encoding="ascii").splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except (OSError, ValueError, binascii.Error) as error:
        raise ConversionFailed(f"{path}: not a readable list of tokens ({error})") from error
    tokens = sorted(ranks, key=ranks.__getitem__)
    if [ranks[token] for token in tokens] != list(range(len(tokens))):
        raise ConversionFailed(f"{path}: the ranks of its tokens have gaps")
    names = [
        "endoftext",
        "startoftranscript",
        *LANGUAGES[:languages],
        "translate",
        "transcribe",
        "startoflm",
        "startofprev",
        "nospeech",
        "notimestamps",
        *(f"{step * 0.02:.2f}" for step in range(_TIMESTAMPS)),
    ]
    special = {f"<|{name}|>": len(tokens) + place for place, name in enumerate(names)}
    merges = [_split(ranks, token) for token in tokens if len(token) > 1]
    return Vocabulary([*tokens, *(name.encode() for name in special)], merges, special)


def read_tokenizer_json(path: Path) -> Vocabulary:
    """Read the `tokenizer.json` of a Hugging Face repository. Raises ConversionFailed when it is none of Whisper's."""
    import json  # noqa: PLC0415

    try:
        content = json.loads(path.read_bytes())
        model, added = content["model"], content["added_tokens"]
        from_text = {character: byte for byte, character in _bytes_as_text().items()}
        spelled: dict[str, int] = model["vocab"]
        special = {str(token["content"]): int(token["id"]) for token in added}
        size = max((*spelled.values(), *special.values())) + 1
        tokens = [b""] * size
        for text, place in spelled.items():
            tokens[place] = text.encode() if text in special else bytes(from_text[c] for c in text)
        for text, place in special.items():
            tokens[place] = text.encode()
        pairs = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
        merges = [(bytes(from_text[c] for c in left), bytes(from_text[c] for c in right)) for left, right in pairs]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConversionFailed(f"{path}: not a readable tokenizer of the Whisper family ({error!r})") from error
    return Vocabulary(tokens, merges, special)


def _split(ranks: dict[bytes, int], token: bytes) -> tuple[bytes, bytes]:
    """The two tokens that are merged into this one: byte-pair encoding stopped before its own rank."""
    limit = ranks[token]
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        best = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], limit))
        if ranks.get(parts[best] + parts[best + 1], limit) >= limit:
            raise ConversionFailed(f"token {token!r} is not the merge of two others")
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts[0], parts[1]


def bytes_to_text(token: bytes, table: dict[int, str]) -> str:
    """A byte string spelled as byte-level tokenizers spell it."""
    return "".join(table[byte] for byte in token)


def _bytes_as_text() -> dict[int, str]:
    """GPT-2's spelling of bytes as printable characters."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in table:
            table[byte] = chr(256 + len(table) - len(printable))
    return table


# Writes a Whisper vocabulary as the two OpenVINO graphs that openvino-genai's pipelines load.

_LONGEST = 1024
_END = "<|endoftext|>"


def write_tokenizer_models(vocabulary: Vocabulary, target: Path) -> None:
    """Write `openvino_tokenizer.xml` and `openvino_detokenizer.xml`, which skips special tokens."""
    special = [SpecialToken(text) for text in vocabulary.special]
    pipeline = TokenizerPipeline()
    pipeline.add_steps(
        [
            SpecialTokensSplit(special),
            RegexSplitStep.byte_level_splitter(),
            BPETokenizationStep(vocab=list(vocabulary.tokens), merges=list(vocabulary.merges)),
            TruncationStep(max_length=_LONGEST),
            CombineSegmentsStep(inputs=[Sequence()]),
            PaddingStep(_END, _token_id=vocabulary.end),
            VocabDecoderStep(vocab=list(vocabulary.tokens), skip_tokens=sorted(vocabulary.special.values())),
            FuseStep(),
            UTF8ValidateStep(mode=UTF8ReplaceMode.REPLACE),
        ]
    )
    tokenizer, detokenizer = pipeline.get_tokenizer_ov_subgraph(), pipeline.get_detokenizer_ov_subgraph()
    tokenizer.outputs[0].add_names({"input_ids"})
    tokenizer.outputs[1].add_names({"attention_mask"})
    # GenAI reads token ids as i64; left as i32 it raises ParameterMismatch.
    tokenizer = change_outputs_type(tokenizer, ov.Type.i64)
    detokenizer = change_inputs_type(detokenizer, ov.Type.i64)
    for model in (tokenizer, detokenizer):
        model.set_rt_info(vocabulary.end, "eos_token_id")
        model.set_rt_info(vocabulary.end, "pad_token_id")
    ov.save_model(tokenizer, target / "openvino_tokenizer.xml")
    ov.save_model(detokenizer, target / "openvino_detokenizer.xml")
