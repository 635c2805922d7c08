"""The messages between the edge process and an engine for generations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from worker_node.core.types import Busy
from worker_node.engines.protocol import TOKEN_BYTES, Outcome


class RawImage(msgspec.Struct, frozen=True, array_like=True):
    """Rows of RGB, a byte each."""

    width: int
    height: int
    pixels: bytes


class ImagePrompt(msgspec.Struct, frozen=True, array_like=True):
    """A prompt for an engine that tokenizes it itself: its text, with GenAI's tags in place of `images`.

    These have about `image_tokens` tokens.
    """

    text: str
    images: list[RawImage]
    image_tokens: int


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the next token is chosen. `temperature` 0 means greedy, `top_k` 0 all tokens.

    `min_p` leaves out tokens less likely than this share of the likeliest. `presence_penalty` and `frequency_penalty`
    are subtracted from the logits of tokens that the answer holds already, once and once per occurrence;
    `repetition_penalty` divides those of the prompt and the answer. `logprobs` asks for the logarithm of each chosen
    token's probability, `token_ids` for the ids of the answer's tokens. `choices` is how many answers to the prompt the
    caller wants; this is one of them.
    With `beams` the likeliest answers are searched for, so many at a time, and this is the one at `rank`; a
    `length_penalty` above 1 favours long ones.
    Within its first `min_tokens` tokens an answer does not end. `stop_token_ids` end it as stop sequences do.

    `open_fields` are the fields that the request says nothing of: there the model's own defaults count, unless its
    dialect has `dialect_defaults` (docs/models.md).
    """

    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: bool = False
    token_ids: bool = False
    choices: int = 1
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    beams: int = 0
    rank: int = 0
    length_penalty: float = 1.0
    open_fields: tuple[str, ...] = ()
    dialect_defaults: Mapping[str, Any] | None = None


# Fields of `Sampling` that only the edge process uses, as the engine gets them.
EDGE_ONLY: Mapping[str, Any] = {
    "max_new_tokens": None,
    "stop": (),
    "token_ids": False,
    "choices": 1,
    "open_fields": (),
    "dialect_defaults": None,
}


class GenerateJob(msgspec.Struct, frozen=True, tag="generate", array_like=True):
    """Continue the prompt whose token ids are `tokens` (int32) by at most `max_new_tokens`.

    The `sampling` has no fields of `EDGE_ONLY`; its `stop_token_ids` must be of the model's vocabulary. `grammar` is
    EBNF that the runtime is known to read: one that it cannot read would break the pipeline for good. Engines with
    vision take the `vision_prompt`; then `tokens` are those of its text. An answer that is streamed must have begun by
    the `deadline`, and may go on until `streamed_until`. An `internal` job is the node's own, such as a canary's, and
    its prompt is not counted as a caller's. `edge_may_stop`: the edge ends it at a stop sequence or token, so each of
    its deltas says what it took.
    """

    id: int
    tokens: bytes
    max_new_tokens: int
    deadline: float
    sampling: Sampling = Sampling()
    interactive: bool = True
    grammar: str | None = None
    vision_prompt: ImagePrompt | None = None
    streamed_until: float = 0.0
    internal: bool = False
    edge_may_stop: bool = False

    @property
    def ends(self) -> float:
        return max(self.deadline, self.streamed_until)

    @property
    def prompt_tokens(self) -> int:
        """How many tokens the prompt has; of images an estimate."""
        images = 0 if self.vision_prompt is None else self.vision_prompt.image_tokens
        return len(self.tokens) // TOKEN_BYTES + images

    def beginning(self, count: int) -> GenerateJob:
        """Return the job that only computes the first `count` tokens of the prompt."""
        tokens = self.tokens[: count * TOKEN_BYTES]
        sampling = Sampling(ignore_eos=True)
        return GenerateJob(self.id, tokens, 1, self.deadline, sampling, self.interactive, internal=self.internal)

    def timeless(self) -> GenerateJob:
        return msgspec.structs.replace(self, id=0, deadline=0.0, streamed_until=0.0, interactive=True, max_new_tokens=0)


class TokenDelta(msgspec.Struct, frozen=True, array_like=True):
    """New token ids of one generation. `finish` is set on the last: stop, length; `logprobs`, where asked for, are
    natural logarithms, one a token.

    `started` (monotonic) is set on the first delta: when the engine took the job up. `busy` is what it took since then,
    on the last delta, and on others where the engine knows it. `at` (monotonic) is when the engine had the tokens.
    Since the last delta of any job the engine computed `prefilled` prompt tokens in `prefill_s` seconds.
    `prompt_tokens`, on the last, is the prompt's exact size where the edge could only estimate it. `cached` of the
    prompt's tokens came from the prefix cache, as far as the engine knows.
    """

    id: int
    tokens: list[int]
    finish: str | None = None
    started: float | None = None
    busy: Busy | None = None
    logprobs: list[float] | None = None
    at: float | None = None
    prefilled: int = 0
    prefill_s: float = 0.0
    prompt_tokens: int | None = None
    cached: int | None = None

    @property
    def last(self) -> bool:
        return self.finish is not None


class Step(Outcome, frozen=True):
    """The token deltas of one engine step, for all running generations at once.

    `announced`: the next step follows at once, and is announced (see `Outcome.followed`).
    """

    deltas: list[TokenDelta]
    announced: bool = False

    @property
    def followed(self) -> bool:
        return self.announced

    def parts(self) -> list[TokenDelta]:
        return self.deltas
