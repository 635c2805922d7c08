"""Names the space that a model's vectors lie in."""

from __future__ import annotations

import hashlib
import json

_HEX_DIGITS = 32


def space_fingerprint(*, weights_sha256: str, tokenizer_sha256: str, layout: str, dimensions: int) -> str:
    """A short name (hex) of all that decides where a text's vector lies: vectors of equal names may be compared.

    `layout` is the pooling and normalisation. The device, the precision and the batch are not part of it: they move a
    vector by no more than rounding does.
    """
    facts = {"dimensions": dimensions, "layout": layout, "tokenizer": tokenizer_sha256, "weights": weights_sha256}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:_HEX_DIGITS]
