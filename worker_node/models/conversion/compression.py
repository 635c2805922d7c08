"""Stores the weights of a model in fewer bits."""

from __future__ import annotations

import re
from typing import Any

import nncf
import openvino as ov

from worker_node.errors import ConversionFailed
from worker_node.models.catalog import Quantization

# The smallest group that the NPU path accepts; one scale a row (group -1) ruins the answers of a 135M model.
_INT4: dict[str, Any] = {
    "mode": nncf.CompressWeightsMode.INT4_SYM,
    "ratio": 1.0,
    "group_size": 64,
    "backup_mode": nncf.BackupMode.INT8_SYM,
}
_INT8: dict[str, Any] = {"mode": nncf.CompressWeightsMode.INT8_SYM}

# The matrices that bear 4 bits best: two fifths of the weights for a third of the harm (docs/models.md).
_ROBUST = re.compile(r"blk\.\d+\.ffn_(gate|up)\.weight")


def compress(model: ov.Model, quantization: Quantization) -> ov.Model:
    """The model with its weights in that form; raises ConversionFailed when nncf refuses.

    Its matrices are f16 constants that bear the names of GGUF tensors.
    """
    try:
        match quantization:
            case Quantization.F16:
                return model
            case Quantization.INT8_SYM:
                return nncf.compress_weights(model, **_INT8)
            case Quantization.INT4_SYM:
                return nncf.compress_weights(model, **_INT4)
            case Quantization.INT4_INT8:
                others = nncf.IgnoredScope(names=_readers_of_others(model))
                return nncf.compress_weights(nncf.compress_weights(model, ignored_scope=others, **_INT4), **_INT8)
            case _:
                raise ConversionFailed(f"generation models are not kept in {quantization}")
    except (nncf.ValidationError, nncf.ParameterNotSupportedError, nncf.InvalidGroupSizeError, RuntimeError) as error:
        raise ConversionFailed(f"nncf could not compress the weights to {quantization}: {error}") from error


def compress_encoder(model: ov.Model) -> ov.Model:
    """The encoder with every matrix in int8, one scale a row. Raises ConversionFailed when nncf refuses."""
    try:
        return nncf.compress_weights(model, **_INT8)
    except (nncf.ValidationError, nncf.ParameterNotSupportedError, RuntimeError) as error:
        raise ConversionFailed(f"nncf could not compress the weights to {Quantization.INT8_SYM}: {error}") from error


def _readers_of_others(model: ov.Model) -> list[str]:
    # The embedding table is left to nncf: it keeps the first and the last layer in int8 by itself.
    return [
        reader.get_node().friendly_name
        for constant in model.get_ordered_ops()
        if constant.get_type_name() == "Constant"
        and constant.friendly_name.startswith("blk.")
        and not _ROBUST.fullmatch(constant.friendly_name)
        for convert in constant.output(0).get_target_inputs()
        if convert.get_node().get_type_name() == "Convert"
        for reader in convert.get_node().output(0).get_target_inputs()
    ]
