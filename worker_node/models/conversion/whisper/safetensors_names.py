"""Reads a Whisper network from the safetensors files of a Hugging Face repository."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from worker_node.core.errors import ConversionFailed
from worker_node.models.conversion.safetensors_file import read_tensors
from worker_node.models.conversion.sentence_config import read_json
from worker_node.models.conversion.whisper.checkpoint import Tensors
from worker_node.models.conversion.whisper.dimensions import Dimensions

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
