"""From token ids to the text of an answer, up to where it ends: a stop sequence or a stop token."""

from __future__ import annotations

from collections.abc import Sequence

from worker_node.core.types import Sampling
from worker_node.tasks.generate.serving.detokenize import StopMatcher
from worker_node.tasks.generate.serving.tokenization import ChatTokenizer


class AnswerText:
    """Takes the tokens of one generation as they arrive.

    Within the first `min_tokens` neither stop sequences nor stop tokens end the answer. What ends it is part of the
    text only with `include_stop`; special tokens are text only without `skip_special_tokens`.
    """

    def __init__(self, tokenizer: ChatTokenizer, sampling: Sampling) -> None:
        self._detokenizer = tokenizer.detokenizer(skip_special_tokens=sampling.skip_special_tokens)
        self._stop = StopMatcher(sampling.stop, include=sampling.include_stop)
        self._stop_tokens = frozenset(sampling.stop_token_ids)
        self._least = sampling.min_tokens
        self._include = sampling.include_stop
        # The model's own end is a stop token too; the engine ends the answer with it.
        ends_itself = not sampling.ignore_eos and not sampling.include_stop
        self._hidden = tokenizer.end_tokens if ends_itself and not sampling.skip_special_tokens else frozenset()
        self._plain = not self._stop_tokens and not self._hidden and (not self._least or not sampling.stop)
        self._stops = bool(sampling.stop)
        self._count = 0
        self._stopped = False

    @property
    def matched(self) -> str | None:
        """The stop sequence that ended the answer."""
        return self._stop.matched

    @property
    def ended(self) -> bool:
        """Whether the answer is complete, whatever the engine still sends."""
        return self._stopped or self._stop.matched is not None

    @property
    def tokens(self) -> int:
        """How many tokens the answer has so far, without those after its end."""
        return self._count

    def push(self, tokens: Sequence[int]) -> str:
        """Add tokens; return the text that is now certain."""
        # With guessed tokens several come at once, and those behind a stop sequence are none of the answer.
        if self._plain and (len(tokens) == 1 or not self._stops):
            self._count += len(tokens)
            return self._stop.push(self._detokenizer.push(tokens))
        text = ""
        for token in tokens:
            if self.ended:
                break
            self._count += 1
            self._stopped = token in self._stop_tokens and self._count > self._least
            if (self._stopped and not self._include) or token in self._hidden:
                continue
            piece = self._detokenizer.push([token])
            text += piece if self._count <= self._least else self._stop.push(piece)
        return text

    def flush(self) -> str:
        """Return what was held back, at the end."""
        if self._stop.matched is not None:
            return ""
        return self._stop.push(self._detokenizer.flush()) + self._stop.flush()
