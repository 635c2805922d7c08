"""GenAI's streamer for token ids: what it calls between two tokens of a stateful pipeline."""

from __future__ import annotations

from collections.abc import Callable

import openvino_genai as genai


class TokenStreamer(genai.StreamerBase):  # type: ignore[misc]  # openvino_genai has no types
    """Calls `on_tokens` for new token ids; the generation is stopped when that returns False or raises.

    An exception out of `write` would make the pipeline unusable for good, so it is kept in `failure` for the caller to
    raise when `generate` has returned. `stopped` says whether this streamer ended the generation.
    """

    def __init__(self, on_tokens: Callable[[list[int]], bool]) -> None:
        super().__init__()
        self._on_tokens = on_tokens
        self.stopped = False
        self.failure: BaseException | None = None

    def write(self, token: int | list[int]) -> genai.StreamingStatus:
        """Take one token id, or several."""
        if not self.stopped:
            try:
                self.stopped = not self._on_tokens(token if isinstance(token, list) else [token])
            except BaseException as error:  # noqa: BLE001  (raised by the engine when it is safe)
                self.failure, self.stopped = error, True
        return genai.StreamingStatus.CANCEL if self.stopped else genai.StreamingStatus.RUNNING

    def end(self) -> None:
        """Nothing: the end is what `generate` returns."""
