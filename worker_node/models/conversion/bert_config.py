"""Reads what a BERT sentence encoder says about itself; refuses what the graph builder does not know."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from worker_node.errors import ConversionFailed

_T = TypeVar("_T")


class Pooling(StrEnum):
    """How the token vectors of a text become one vector."""

    MEAN = "mean"
    CLS = "cls"


# The names that Hugging Face configurations use, and OpenVINO's approximation mode of Gelu for each.
GELU_MODES = {"gelu": "erf", "gelu_python": "erf", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}


class BertConfig(msgspec.Struct, frozen=True):
    """`config.json`: the sizes of the encoder."""

    model_type: str
    architectures: tuple[str, ...]
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    vocab_size: int
    hidden_act: str
    layer_norm_eps: float
    type_vocab_size: int = 2
    position_embedding_type: str = "absolute"
    is_decoder: bool = False
    add_cross_attention: bool = False

    @property
    def head_size(self) -> int:
        """Elements of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def gelu_mode(self) -> str:
        """OpenVINO's approximation mode for the activation."""
        return GELU_MODES[self.hidden_act]


class SentenceEncoder(msgspec.Struct, frozen=True):
    """The encoder with what follows it: pooling, then normalisation to unit length if the model has it."""

    bert: BertConfig
    pooling: Pooling
    normalise: bool
    context_limit: int


class _Module(msgspec.Struct, frozen=True):
    path: str
    type: str


class _SentenceBert(msgspec.Struct, frozen=True):
    max_seq_length: int
    do_lower_case: bool = False


class _SentenceTransformers(msgspec.Struct, frozen=True):
    default_prompt_name: str | None = None


def read_sentence_encoder(directory: Path) -> SentenceEncoder:
    """Read a model directory as sentence-transformers publishes it.

    Raises ConversionFailed, naming the file and the option, for anything that would need another graph.
    """
    bert = _read(directory / "config.json", BertConfig)
    _check_bert(bert, directory / "config.json")
    modules = _read(directory / "modules.json", tuple[_Module, ...])
    kinds = [module.type.rpartition(".")[2] for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ConversionFailed(
            f"{directory / 'modules.json'}: the chain of modules {kinds} is not known; "
            "known are Transformer, Pooling and, after these, Normalize"
        )
    limits = _read(directory / "sentence_bert_config.json", _SentenceBert)
    if limits.do_lower_case:
        raise ConversionFailed(
            f"{directory / 'sentence_bert_config.json'}: do_lower_case is not known; tokenizer.json lower-cases"
        )
    prompts = directory / "config_sentence_transformers.json"
    if prompts.exists() and _read(prompts, _SentenceTransformers).default_prompt_name is not None:
        raise ConversionFailed(f"{prompts}: default_prompt_name is not known")
    return SentenceEncoder(
        bert=bert,
        pooling=_read_pooling(directory / modules[1].path / "config.json", bert.hidden_size),
        normalise="Normalize" in kinds,
        context_limit=min(limits.max_seq_length, bert.max_position_embeddings),
    )


def _read(path: Path, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        raise ConversionFailed(f"{path}: not readable ({error})") from error


def _check_bert(config: BertConfig, path: Path) -> None:
    demands = {
        "model_type": (config.model_type, config.model_type == "bert"),
        "architectures": (config.architectures, config.architectures == ("BertModel",)),
        "hidden_act": (config.hidden_act, config.hidden_act in GELU_MODES),
        "position_embedding_type": (
            config.position_embedding_type,
            config.position_embedding_type == "absolute",
        ),
        "is_decoder": (config.is_decoder, not config.is_decoder),
        "add_cross_attention": (config.add_cross_attention, not config.add_cross_attention),
        "num_attention_heads": (
            config.num_attention_heads,
            config.hidden_size % config.num_attention_heads == 0,
        ),
    }
    for option, (value, known) in demands.items():
        if not known:
            raise ConversionFailed(
                f"{path}: {option} = {value!r} is not known; only plain BERT encoders (BertModel) are"
            )


def _read_pooling(path: Path, hidden_size: int) -> Pooling:
    options = _read(path, dict[str, Any])
    if options.get("word_embedding_dimension") != hidden_size:
        raise ConversionFailed(f"{path}: word_embedding_dimension is not the encoder's hidden size, {hidden_size}")
    chosen = sorted(name for name, value in options.items() if name.startswith("pooling_mode_") and value is True)
    if chosen == ["pooling_mode_mean_tokens"]:
        return Pooling.MEAN
    if chosen == ["pooling_mode_cls_token"]:
        return Pooling.CLS
    raise ConversionFailed(f"{path}: pooling {chosen} is not known; known are mean_tokens and cls_token, one of them")
