"""What every request and every reply carries, whatever its task.

Times are seconds of `time.monotonic()`, which on Linux is one clock for all processes of a machine, so an absolute
deadline may travel to an engine process. Durations in replies are milliseconds; busy times microseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from worker_node.domain.models import Device


class Priority(StrEnum):
    """`interactive` work goes before `batch` work."""

    INTERACTIVE = "interactive"
    BATCH = "batch"


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What every request carries, whatever its dialect.

    `arrived` and `deadline` are absolute monotonic times; `require_device` forbids every other placement. A generation
    needs room for `min_new_tokens` after its prompt. For an engine that is started at start-up or after a crash, and
    for memory, it waits at most `restart_wait_s` seconds (None: until its deadline). With `own_proof` the caller holds
    the NPU that it requires and reads its counter, so nothing is run again. With `dry_run` nothing is loaded or run:
    the routing decision is all that is wanted. `note_ignored` is called with the place of each part of the request that
    has no effect, `note_limited` with a field of which less can be had than was asked for, and how much that is.
    """

    request_id: str
    arrived: float
    deadline: float
    priority: Priority = Priority.INTERACTIVE
    require_device: Device | None = None
    min_new_tokens: int = 1
    restart_wait_s: float | None = None
    own_proof: bool = False
    dry_run: bool = False
    note_ignored: Callable[[str], None] = field(default=lambda _place: None, compare=False, repr=False)
    note_limited: Callable[[str, int], None] = field(default=lambda _name, _most: None, compare=False, repr=False)

    @property
    def interactive(self) -> bool:
        """Whether it goes before batch work."""
        return self.priority is Priority.INTERACTIVE

    def restart_by(self, now: float) -> float:
        """Until when a request that begins to wait at `now` waits for an engine that no request has loaded."""
        return self.deadline if self.restart_wait_s is None else min(self.deadline, now + self.restart_wait_s)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens in and out, as the model's own tokenizer counts them; `reasoning_tokens` are among those out."""

    prompt_tokens: int
    completion_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of each stage. `total` and `first_token` count from the request's arrival.

    `inference` is the time on the device: the batches that held an embedding's texts, or a generation from its start in
    the engine to its end.
    """

    queue: float
    tokenize: float
    inference: float
    total: float
    first_token: float | None = None
