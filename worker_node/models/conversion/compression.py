"""Stores the weights of a generation model in fewer bits."""

from __future__ import annotations

from typing import Any

import nncf
import openvino as ov

from worker_node.errors import ConversionFailed
from worker_node.models.catalog import Quantization

# The smallest group that the NPU path accepts; one scale a row (group -1) ruins the answers of a 135M model.
GROUP_SIZE = 64

_MODES: dict[Quantization, dict[str, Any]] = {
    Quantization.F16: {},
    Quantization.INT8_SYM: {"mode": nncf.CompressWeightsMode.INT8_SYM},
    Quantization.INT4_SYM: {
        "mode": nncf.CompressWeightsMode.INT4_SYM,
        "ratio": 1.0,
        "group_size": GROUP_SIZE,
        "backup_mode": nncf.BackupMode.INT8_SYM,
    },
}


def compress(model: ov.Model, quantization: Quantization) -> ov.Model:
    """The model with its weights in that form; raises ConversionFailed when nncf refuses."""
    try:
        options = _MODES[quantization]
    except KeyError as error:
        raise ConversionFailed(
            f"generation models are not kept in {quantization}; known: {', '.join(_MODES)}"
        ) from error
    if not options:
        return model
    try:
        return nncf.compress_weights(model, **options)
    except (nncf.ValidationError, nncf.ParameterNotSupportedError, RuntimeError) as error:
        raise ConversionFailed(f"nncf could not compress the weights to {quantization}: {error}") from error
