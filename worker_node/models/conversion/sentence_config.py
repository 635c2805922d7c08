"""Reads what a sentence encoder says about itself; refuses what would need another graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from worker_node.core.errors import ConversionFailed
from worker_node.models.conversion.job import ConversionJob
from worker_node.models.conversion.pooling import Pooling

_T = TypeVar("_T")

# The names that Hugging Face configurations use, and OpenVINO's approximation mode of Gelu for each.
GELU_MODES = {"gelu": "erf", "gelu_python": "erf", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}


_POOLING_NAMES = {
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_cls_token": Pooling.CLS,
    "pooling_mode_lasttoken": Pooling.LAST,
    "mean": Pooling.MEAN,
    "cls": Pooling.CLS,
    "lasttoken": Pooling.LAST,
}


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


class SentenceConfig(msgspec.Struct, frozen=True):
    """What follows the encoder, and how many tokens it was made for."""

    pooling: Pooling
    normalise: bool
    max_tokens: int

    @property
    def layout(self) -> str:
        """Both in words, as part of the name of the vector space."""
        return f"{self.pooling}, {'normalised' if self.normalise else 'as it is'}"


class _Module(msgspec.Struct, frozen=True):
    path: str
    type: str


class _SentenceBert(msgspec.Struct, frozen=True):
    max_seq_length: int | None = None
    do_lower_case: bool = False


class _SentenceTransformers(msgspec.Struct, frozen=True):
    default_prompt_name: str | None = None


def read_bert_config(
    directory: Path, model_type: str = "bert", architecture: str = "BertModel", what: str = "plain BERT encoders"
) -> BertConfig:
    """Read `config.json`; raises ConversionFailed, naming the option, for anything but that architecture (`what`)."""
    path = directory / "config.json"
    config = read_json(path, BertConfig)
    demands = {
        "model_type": (config.model_type, config.model_type == model_type),
        "architectures": (config.architectures, config.architectures == (architecture,)),
        "hidden_act": (config.hidden_act, config.hidden_act in GELU_MODES),
        "position_embedding_type": (config.position_embedding_type, config.position_embedding_type == "absolute"),
        "is_decoder": (config.is_decoder, not config.is_decoder),
        "add_cross_attention": (config.add_cross_attention, not config.add_cross_attention),
        "num_attention_heads": (
            config.num_attention_heads,
            config.num_attention_heads > 0 and config.hidden_size % config.num_attention_heads == 0,
        ),
    }
    for option, (value, known) in demands.items():
        if not known:
            raise ConversionFailed(f"{path}: {option} = {value!r} is not known; only {what} ({architecture}) are")
    return config


class _Positions(msgspec.Struct, frozen=True):
    max_position_embeddings: int


class _TokenizerLimits(msgspec.Struct, frozen=True):
    model_max_length: float | None = None


def sentence_config_of(directory: Path, job: ConversionJob) -> SentenceConfig:
    """What follows the encoder, from the directory's files, or from the job where they do not specify it.

    Raises ConversionFailed when neither does, when they contradict each other, or for what is not known.
    """
    if (directory / "modules.json").is_file():
        found = read_sentence_config(directory)
        if job.pooling not in (None, found.pooling) or job.normalize not in (None, found.normalise):
            raise ConversionFailed(
                f"{directory / 'modules.json'}: vectors are {found.layout} by these files; remove pooling and normalize"
            )
        return found
    if job.pooling is None:
        known = " or ".join(f'"{pooling}"' for pooling in Pooling)
        raise ConversionFailed(
            f"{directory}: no modules.json says how token vectors become one vector; set pooling = {known}"
        )
    return SentenceConfig(Pooling(job.pooling), job.normalize is not False, token_limit(directory, None))


def read_sentence_config(directory: Path) -> SentenceConfig:
    """Read the modules that sentence-transformers would run after the encoder.

    Raises ConversionFailed, naming the file and the option, when there are none or one is not known.
    """
    modules = read_json(directory / "modules.json", tuple[_Module, ...])
    kinds = [module.type.rpartition(".")[2] for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ConversionFailed(
            f"{directory / 'modules.json'}: the chain of modules {kinds} is not known; "
            "known are Transformer, Pooling and, after these, Normalize"
        )
    path = directory / "sentence_bert_config.json"
    limits = read_json(path, _SentenceBert) if path.is_file() else _SentenceBert()
    if limits.do_lower_case:
        raise ConversionFailed(f"{path}: do_lower_case is not known; it is tokenizer.json that should lower-case")
    prompts = directory / "config_sentence_transformers.json"
    if prompts.exists() and read_json(prompts, _SentenceTransformers).default_prompt_name is not None:
        raise ConversionFailed(f"{prompts}: default_prompt_name is not known")
    return SentenceConfig(
        pooling=_read_pooling(directory / modules[1].path / "config.json"),
        normalise="Normalize" in kinds,
        max_tokens=token_limit(directory, limits.max_seq_length),
    )


def token_limit(directory: Path, stated: int | None) -> int:
    """The most tokens of a text: as stated, else what the tokenizer says, and never more than there are positions."""
    positions = read_json(directory / "config.json", _Positions).max_position_embeddings
    path = directory / "tokenizer_config.json"
    if stated is None and path.is_file():
        # Tokenizers without a limit have 1e30 here.
        stated = int(min(read_json(path, _TokenizerLimits).model_max_length or positions, positions))
    return min(stated or positions, positions)


def read_json(path: Path, kind: type[_T]) -> _T:
    """Read a JSON file as that type; raises ConversionFailed, naming the file, when it is missing or something else."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        raise ConversionFailed(f"{path}: not readable ({error})") from error


def _read_pooling(path: Path) -> Pooling:
    options = read_json(path, dict[str, Any])
    chosen = sorted(name for name, value in options.items() if name.startswith("pooling_mode_") and value is True)
    # Newer versions of sentence-transformers write one name.
    chosen = chosen or [str(options.get("pooling_mode"))]
    if len(chosen) == 1 and chosen[0] in _POOLING_NAMES:
        return _POOLING_NAMES[chosen[0]]
    raise ConversionFailed(
        f"{path}: pooling {chosen} is not known; known are mean_tokens, cls_token and lasttoken, one of them"
    )
