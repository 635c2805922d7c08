"""Every default of the client: its number, its limits and its reason. Times are seconds unless the name says otherwise.

The settings have the same groups: `[retry] attempts = 2` in the file is `RetryOptions(attempts=2)` here.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

LONGEST_S = 999_999.0
"""The longest time that nodes accept, 11 days: what is longer, or infinite, is a mistake."""

Positive = Annotated[float, Field(gt=0, le=LONGEST_S)]
NotNegative = Annotated[float, Field(ge=0, le=LONGEST_S)]
Share = Annotated[float, Field(ge=0, lt=1)]
PositiveShare = Annotated[float, Field(gt=0, lt=1)]
Count = Annotated[int, Field(gt=0)]


class Options(BaseModel):
    """Numbers that are checked when they are given. Raises pydantic's ValidationError, which is a ValueError."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Timeouts(Options):
    """How long a call may take when the caller does not say: until a whole reply is there, or a stream has begun.

    A stream that has begun has no limit of its own as long as parts come; a `timeout` of the call bounds it to its end.
    `embed`: the slowest honest answer is a full batch behind a full queue, a few seconds; 30 leaves room for one
    node's death and a retry. `generate`: 1,000 tokens at the NPU's 10 tokens/s. `connect`: a LAN answers a SYN within
    milliseconds, Linux repeats a lost one after 1 s, and services block their event loop for a second now and then.
    `attempt`: one try at an embedding; a node that froze is noticed by its probes much earlier, this catches an engine
    that hangs inside a healthy node. `idle`: silence on the connection of a stream of events; a node sends a comment
    every 15 s. Ollama's lines have none: `silence` and the deadline bound them.
    `silence`: the wait for the next part of a stream that has begun, and for a caller of the gateway to read it;
    parts are seconds apart, but nodes may hold a tool call back until it is complete. `share`: while
    another node could serve it, an attempt (for generation: the wait for the first or the next token) gets at most this
    share of the remaining time, so that a hung engine costs half of the deadline.
    """

    embed: Positive = 30.0
    generate: Positive = 120.0
    connect: Positive = 2.0
    attempt: Positive = 10.0
    idle: Positive = 45.0
    silence: Positive = 120.0
    share: PositiveShare = 0.5


class ProbeOptions(Options):
    """Active health checks.

    Two probes in a row must fail before a node counts as dead, and both fit into the promised 3 s even when the node
    froze just after a good one: 1.0 + 10 % jitter + 0.8 (first fails) + 0.2 + 0.8 (second fails) = 2.9 s.
    """

    interval: Positive = 1.0
    jitter: Share = 0.1
    timeout: Positive = 0.8
    retry_interval: Positive = 0.2
    failures: Count = 2


class BreakerOptions(Options):
    """When a node is ejected, and for how long.

    Fleets have 1 to 5 nodes, so statistics never have the samples; consecutive failures do. `connection_failures` 2:
    one may be a packet, two are a node. `server_failures` 5 (Envoy's number): a 500 may belong to the request.
    Quarantine is `base`·2ⁿ up to `longest` (elastic-transport's numbers) ± `jitter`; `forget` seconds of good service
    set n back to 0, so that a node which flaps is ejected for longer each time. `recovery` is what remains of a
    quarantine once a probe passes again after failing: the promise is 5 s. `longest_probed`: a node whose connections
    break while its probes pass is ejected for no longer, so that it serves again within 5 s of its recovery; a trial
    costs one caller a retry.

    One model on one node has a breaker of its own. `server_failures` open it, or `silent_attempts` attempts in a row
    at whose end it had given nobody an answer or a token for at least a second. Its quarantine is at most
    `longest_model`: a trial costs one caller half of its deadline, and a hung engine that recovers serves again within
    5 s.
    """

    connection_failures: Count = 2
    server_failures: Count = 5
    base: Positive = 1.0
    longest: Positive = 30.0
    longest_probed: Positive = 4.0
    jitter: Share = 0.2
    forget: Positive = 30.0
    recovery: Positive = 1.0
    silent_attempts: Positive = 2.0
    longest_model: Positive = 4.0


class RetryOptions(Options):
    """How much extra load failures may cause.

    `attempts` 3: the third node of a small fleet, or the same node twice after being busy. The budget takes in
    `per_request` retries for each call and `per_second` for each second (half of Envoy's 20 %), starts with `initial`
    (so that a script's first call has all its attempts) and saves up to `saved` (a node that dies takes with it as
    many requests as were in flight there; AWS SDKs save 100 as well). A call that finds it empty waits up to
    `patience` seconds for it to fill, while another node could take the request at once: what a dying node had in
    flight is then retried a little later rather than lost. A call that the only node refused for a while waits up
    to half of its time. `pause` is the first pause before the *same* node is asked again, doubled each time with
    full jitter, and the least after a refusal, whatever its Retry-After; another node is asked at once.
    """

    attempts: Count = 3
    per_request: NotNegative = 0.1
    per_second: NotNegative = 1.0
    initial: NotNegative = 2.0
    saved: Positive = 100.0
    patience: NotNegative = 5.0
    pause: NotNegative = 0.05


class BatchOptions(Options):
    """How `embed_many` cuts its work.

    A node reaches its full rate with batches of 32 to 64 texts; more only makes a retry more expensive. `tokens`
    bounds a batch of long texts, counted at `bytes_per_token` UTF-8 bytes (English has 4 to 5; 3 errs on the safe
    side). Three batches a node keep its queue filled while one is on the wire.
    """

    texts: Count = 64
    tokens: Count = 16_384
    bytes_per_token: Positive = 3.0
    per_node: Count = 3


class FallbackOptions(Options):
    """What the NPU leg leaves of the deadline for the cloud: `share` of it, at most `longest`."""

    share: Share = 0.25
    longest: NotNegative = 10.0


class FailoverOptions(Options):
    """When an answer is given up sooner than it must be. All are off (None) unless they are set: docs/failover.md.

    `first_token_s` bounds the wait for the first token of an answer, and `stall_s` that for each next one, while
    another node or the cloud could take over. Once a part of a stream has reached the caller nobody can: `stall_s` ends
    it. `on_context_length` names the model that gets a chat or a prompt which is too long for its own: one of the
    nodes, or of `cloud.chat_models`. `stream_recovery`: the gateway holds a stream back until it is complete, so that
    one which breaks can be made again elsewhere.
    """

    first_token_s: Positive | None = None
    stall_s: Positive | None = None
    on_context_length: Annotated[str, Field(min_length=1)] | None = None
    stream_recovery: Literal["restart"] | None = None

    @classmethod
    def read(cls, text: str) -> Self:
        """The options of `first_token_s=5, stall_s=off`. Raises ValueError with what they must be and what is wrong."""
        parts = [part.partition("=") for part in text.split(",") if part.strip()]
        given = {name.strip(): value.strip() for name, _, value in parts}
        if len(given) < len(parts):
            raise ValueError(f"options that are given once each, as in first_token_s=5, stall_s=off; got {text[:80]!r}")
        try:
            return cls.model_validate({name: None if value == "off" else value for name, value in given.items()})
        except ValidationError as error:
            first, known = error.errors()[0], ", ".join(cls.model_fields)
            wrong = str(first["loc"][0])
            got = f"{wrong}={given[wrong]}"[:80]
            raise ValueError(
                f"options among {known}, as in first_token_s=5, stall_s=off; got {got!r}: {first['msg']}"
            ) from None

    def over(self, others: Self) -> Self:
        """These options where they are set, else the others."""
        return others.model_copy(update=self.model_dump(exclude_unset=True))


NO_FAILOVER = FailoverOptions()
"""No answer is given up early."""


class ClientOptions(Options):
    """All of them. `discovery_interval`: looking up a name, or at a file, costs nothing at this rate.

    `affinity`: requests of one conversation prefer the node that has its beginning in its prefix cache.
    `connections_per_node`: a node takes 1,024 in all, shared by the backends that call it.
    `max_reply_bytes`: 2,048 texts of 4,096 dimensions are 32 MB; more is not an answer of a node.
    """

    timeouts: Timeouts = Timeouts()
    probe: ProbeOptions = ProbeOptions()
    breaker: BreakerOptions = BreakerOptions()
    retry: RetryOptions = RetryOptions()
    batch: BatchOptions = BatchOptions()
    fallback: FallbackOptions = FallbackOptions()
    failover: FailoverOptions = NO_FAILOVER
    affinity: bool = True
    connections_per_node: Count = 128
    discovery_interval: Positive = 5.0
    max_reply_bytes: Count = 64 * 1024 * 1024
