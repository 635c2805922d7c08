"""The tokenizer of an encoder as it is installed. It needs nothing of the extra `convert`: nodes read it, too."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from tokenizers import Tokenizer

from worker_node.core.errors import ConversionFailed

TOKENIZER_FILE = "tokenizer.json"


def write_tokenizer(source: Path, target: Path) -> str:
    """Copy a tokenizer with its truncation and padding taken out; returns the sha256 of what it says.

    The hash is over a canonical form, so that it depends on what the tokenizer does and not on its layout.
    Raises ConversionFailed when the file is missing or no tokenizer.
    """
    try:
        content = json.loads(source.read_bytes())
        content["truncation"] = content["padding"] = None
        canonical = json.dumps(content, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
        Tokenizer.from_str(canonical)
    except Exception as error:
        # The tokenizers library raises plain Exception for what it cannot read.
        raise ConversionFailed(f"{source}: not a readable tokenizer ({error})") from error
    target.write_text(canonical, encoding="utf-8")
    return hashlib.sha256(canonical.encode()).hexdigest()
