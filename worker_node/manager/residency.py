"""The manager's record of one engine: whether it is wanted, how much memory it takes, how long it loads."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

# Until a load has been timed: a process that starts and imports OpenVINO, then reads and compiles the weights.
_START_S = 3.0
_BYTES_PER_S = 100e6


@dataclass(slots=True)
class Residency:
    """The record of one engine. Bytes and monotonic seconds.

    `estimate` is its memory before it was ever loaded, `after_load` what was measured when it had been, `held` what it
    takes now. `ask` notifies the manager of a change; without a manager the engine is loaded at once.
    `on_request`: the load was begun for a request, and others wait for it too. `insisted`: it is wanted whether or not
    anybody waits for it. `spare`: it is loaded only into memory that is free now. `refusal` says why the last load
    request was refused, `shortage` why the present one waits for memory. `cold`: its first load compiles for an NPU,
    which takes minutes or hours.
    """

    estimate: int = 0
    weights: int = 0
    pinned: bool = False
    pool: str = "host"
    clock: Callable[[], float] = time.monotonic
    ask: Callable[[], None] | None = None
    after_load: int | None = None
    held: int | None = None
    wanted_since: float | None = None
    on_request: bool = False
    leave: bool = False
    unloading: bool = False
    insisted: bool = False
    spare: bool = False
    refusal: str | None = None
    shortage: str | None = None
    cold: bool = False
    waiters: int = 0
    patient: int = 0
    loading_since: float | None = None
    load_s: float | None = None
    ready_at: float = 0.0
    loads: int = 0
    ahead_s: float = 0.0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def memory(self) -> int:
        """The bytes that a load takes, as far as is known."""
        return self.after_load if self.after_load is not None else self.estimate

    def want(self, *, on_request: bool = False, insist: bool = True) -> None:
        """Load the engine as soon as possible."""
        self.leave = False
        self.refusal = None
        self.on_request = self.on_request or on_request
        self.insisted = self.insisted or insist
        if self.wanted_since is None:
            self.wanted_since = self.clock()
        if self.ask is not None:
            self.ask()

    def settle(self) -> None:
        """Withdraw the wish: the load has ended or was refused, or its callers have left."""
        self.wanted_since = self.shortage = None
        self.on_request = self.insisted = False

    def observe(self, *, loading: bool, ready: bool, memory: int | None) -> None:
        """Record the engine's state. `memory` is what its process takes, None if it has none."""
        now = self.clock()
        self.held = memory if loading or ready else None
        if loading:
            self.loading_since = now if self.loading_since is None else self.loading_since
        elif self.loading_since is not None:
            if ready:
                self.load_s, self.ready_at, self.after_load = now - self.loading_since, now, memory
                self.loads += 1
            self.loading_since = None
            self.settle()
            self.changed()

    def changed(self) -> None:
        """Wake all callers of `change`."""
        event, self._changed = self._changed, asyncio.Event()
        event.set()

    def change(self) -> Coroutine[None, None, object]:
        """Return what to await for the first change after this call."""
        return self._changed.wait()

    def expected_load_s(self) -> float:
        """How long a load takes: as the last one did, else guessed from the weights' size; inf for a cold compile."""
        if self.load_s is not None:
            return self.load_s
        return math.inf if self.cold else _START_S + self.weights / _BYTES_PER_S

    def ready_in(self) -> float:
        """Seconds until a load that is wanted or going on is likely to have ended."""
        if self.loading_since is None:
            return self.ahead_s + self.expected_load_s()
        return max(0.5, self.loading_since + self.expected_load_s() - self.clock())
