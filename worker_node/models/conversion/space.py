"""Names the space that a model's vectors lie in."""

from __future__ import annotations

import hashlib
import json

_HEX_DIGITS = 32


def space_fingerprint(
    *, weights_sha256: str, tokenizer_sha256: str, pooling: str, normalised: bool, dimensions: int
) -> str:
    """A short name (hex) of all that decides where a text's vector lies: vectors of equal names may be
    compared.

    The device, the precision and the batch are not part of it: they move a vector by less than rounding does.
    """
    facts = {
        "dimensions": dimensions,
        "normalised": normalised,
        "pooling": pooling,
        "tokenizer": tokenizer_sha256,
        "weights": weights_sha256,
    }
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:_HEX_DIGITS]
