"""What Intel's NPU compiler predicts for models of the catalog: an expectation to compare a measurement with.

`python -m tests.wine.npu_compiler` writes predictions.json out of what it compiles (docs/npu-compiled.md). The
compiler knows neither the host nor the driver, so admission, routing and verdicts never read a prediction.
"""

from __future__ import annotations

from importlib import resources

import msgspec

Range = tuple[float, float]


class Prediction(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A catalog's model with weights of one form, compiled for `tokens` on one architecture.

    `ms` is one run of an encoder, or a prompt that fills its window; at the lowest and the highest frequency, as
    `tokens_per_s` at the end of the window.
    """

    model: str
    weights: str
    architecture: str
    tokens: int
    ms: Range
    tokens_per_s: Range | None = None


def in_words(predicted: Range | None, unit: str) -> str:
    """The end of a check's detail, beside a measurement of the same."""
    if predicted is None:
        return ""
    least, most = sorted(predicted)
    return f"; Intel's compiler predicts {least:g} to {most:g} {unit}"


def predictions_for(model: str, weights: str, architecture: str) -> list[Prediction]:
    """The predictions for one model on one architecture, by the length it is compiled for; none where unknown."""
    content = resources.files(__package__).joinpath("predictions.json").read_bytes()
    wanted = (model, weights, architecture)
    every = msgspec.json.decode(content, type=list[Prediction])
    found = [each for each in every if (each.model, each.weights, each.architecture) == wanted]
    return sorted(found, key=lambda each: each.tokens)
