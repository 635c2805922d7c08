"""Reads OpenAI's own Whisper checkpoints (`tiny.en.pt`, …) without torch and without running code from the file.

The file is a zip archive: `*/data.pkl` holds a pickle whose tensors refer to `*/data/<key>`, raw little-endian arrays.
A general unpickler would execute what the file says; this one resolves four names and rejects every other one."""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from worker_node.core.errors import ConversionFailed
from worker_node.models.convert.encoder import read_json
from worker_node.models.convert.safetensors import read_tensors
from worker_node.models.convert.whisper.network import Dimensions

Tensors = dict[str, NDArray[np.float32]]

_STORAGES = {"FloatStorage": np.dtype("<f4"), "HalfStorage": np.dtype("<f2")}
# No Whisper checkpoint is larger than 3.1 GB; a zip entry that claims more is not read.
_LARGEST_ENTRY = 4 << 30


def read_checkpoint(path: Path) -> tuple[Dimensions, Tensors]:
    """The network's sizes and its tensors as float32, by OpenAI's names (`decoder.blocks.0.attn.query.weight`).

    Raises ConversionFailed when the file is damaged, refers to code, or is not a Whisper checkpoint.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entry = next((name for name in archive.namelist() if name.endswith("/data.pkl")), None)
            if entry is None:
                raise ConversionFailed(f"{path}: the archive has no data.pkl; a PyTorch checkpoint has one")
            content = _Unpickler(archive, entry.removesuffix("data.pkl")).load()
            sizes, state = content["dims"], content["model_state_dict"]
            dimensions = Dimensions(**{field.name: int(sizes[field.name]) for field in fields(Dimensions)})
            return dimensions, {str(name): np.ascontiguousarray(x, dtype=np.float32) for name, x in state.items()}
    except ConversionFailed:
        raise
    except (OSError, zipfile.BadZipFile, pickle.UnpicklingError, KeyError, TypeError, ValueError, EOFError) as error:
        raise ConversionFailed(f"{path}: not a Whisper checkpoint of OpenAI's form ({error})") from error


class _Unpickler(pickle.Unpickler):
    def __init__(self, archive: zipfile.ZipFile, prefix: str) -> None:
        super().__init__(io.BytesIO(_entry(archive, f"{prefix}data.pkl")))
        self._archive, self._prefix = archive, prefix

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild_tensor
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which a Whisper checkpoint does not need")

    def persistent_load(self, pid: Any) -> NDArray[Any]:
        kind, dtype, key, _device, count = pid
        if kind != "storage" or not isinstance(dtype, np.dtype):
            raise pickle.UnpicklingError("it has a reference that is not a tensor storage")
        return np.frombuffer(_entry(self._archive, f"{self._prefix}data/{key}"), dtype=dtype, count=count)


def _entry(archive: zipfile.ZipFile, name: str) -> bytes:
    info = archive.getinfo(name)
    if info.file_size > _LARGEST_ENTRY:
        raise ConversionFailed(f"entry {name} claims {info.file_size} bytes; no Whisper tensor is that large")
    return archive.read(info)


def _rebuild_tensor(
    storage: NDArray[Any], offset: int, size: Sequence[int], stride: Sequence[int], *_: object
) -> NDArray[Any]:
    if offset < 0 or any(n < 0 for n in (*size, *stride)) or len(size) != len(stride):
        raise ValueError("a tensor has a negative extent")
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if size else offset
    if all(size) and last >= len(storage):
        raise ValueError("a tensor reaches beyond its storage")
    strides = tuple(step * storage.itemsize for step in stride)
    return np.lib.stride_tricks.as_strided(storage[offset:], shape=tuple(size), strides=strides, writeable=False)


# Reads a Whisper network from the safetensors files of a Hugging Face repository.

_PARTS = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "out"}
_PLAIN = {
    "encoder.embed_positions.weight": "encoder.positional_embedding",
    "encoder.layer_norm.weight": "encoder.ln_post.weight",
    "encoder.layer_norm.bias": "encoder.ln_post.bias",
    "decoder.embed_tokens.weight": "decoder.token_embedding.weight",
    "decoder.embed_positions.weight": "decoder.positional_embedding",
    "decoder.layer_norm.weight": "decoder.ln.weight",
    "decoder.layer_norm.bias": "decoder.ln.bias",
}
_IN_LAYER = re.compile(r"(encoder|decoder)\.layers\.(\d+)\.(\w+)(?:\.(\w+))?\.(weight|bias)")
_NORMS = {
    "self_attn_layer_norm": "attn_ln",
    "encoder_attn_layer_norm": "cross_attn_ln",
    "final_layer_norm": "mlp_ln",
    "fc1": "mlp.0",
    "fc2": "mlp.2",
}
_ATTENTIONS = {"self_attn": "attn", "encoder_attn": "cross_attn"}


class _Config(msgspec.Struct, frozen=True):
    num_mel_bins: int
    max_source_positions: int
    max_target_positions: int
    d_model: int
    encoder_layers: int
    encoder_attention_heads: int
    decoder_layers: int
    decoder_attention_heads: int
    vocab_size: int
    activation_function: str = "gelu"


def read_repository(source: Path) -> tuple[Dimensions, Tensors]:
    """Sizes from config.json and tensors from model.safetensors, by the names of OpenAI's checkpoints.

    Raises ConversionFailed when a file is missing or damaged, or when the network is of another form.
    """
    config = read_json(source / "config.json", _Config)
    if config.activation_function != "gelu":
        raise ConversionFailed(
            f"{source / 'config.json'}: activation {config.activation_function} is not supported; Whisper uses gelu"
        )
    sizes = Dimensions(
        n_mels=config.num_mel_bins,
        n_audio_ctx=config.max_source_positions,
        n_audio_state=config.d_model,
        n_audio_head=config.encoder_attention_heads,
        n_audio_layer=config.encoder_layers,
        n_vocab=config.vocab_size,
        n_text_ctx=config.max_target_positions,
        n_text_state=config.d_model,
        n_text_head=config.decoder_attention_heads,
        n_text_layer=config.decoder_layers,
    )
    tensors = read_tensors(source / "model.safetensors")
    # The output projection is the token embedding again; some exports write it out.
    return sizes, {openai_name(name): x for name, x in tensors.items() if name != "proj_out.weight"}


def openai_name(name: str) -> str:
    """`model.decoder.layers.0.encoder_attn.q_proj.weight` to `decoder.blocks.0.cross_attn.query.weight`.

    Other names are returned as they are, without `model.`; the builder rejects those that it does not know.
    """
    name = name.removeprefix("model.")
    if name in _PLAIN:
        return _PLAIN[name]
    found = _IN_LAYER.fullmatch(name)
    if found is None:
        return name
    side, layer, unit, part, kind = found.groups()
    if part is None:
        return f"{side}.blocks.{layer}.{_NORMS.get(unit, unit)}.{kind}"
    return f"{side}.blocks.{layer}.{_ATTENTIONS.get(unit, unit)}.{_PARTS.get(part, part)}.{kind}"
