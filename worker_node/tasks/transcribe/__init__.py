"""Speech recognition: audio in, text with times out."""

from __future__ import annotations
