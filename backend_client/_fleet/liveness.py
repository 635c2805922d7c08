"""Signs of life of one model on one node: a hung engine behind a healthy /health is found by its silence.

An attempt that ended without an answer, because its limit, its call's deadline or its caller ended it, is weighed by
how long the model had been silent by then: no answer and no token for any request of this client. It weighs 1 when that
is `silence_factor` times the usual time to an answer, less when it is shorter, and nothing below the usual time: a
caller who allows 5 ms for what takes 50 must not harm the node for others. Attempts at the same time together weigh no
more than the silence was long. Any answer or token resets the sum.
"""

from __future__ import annotations

from backend_client.options import BreakerOptions

_WEIGHT_OF_NEW = 0.2
_REMEMBERED = 512
# As for probes: so many timeouts in a row may be the fault of a blocked event loop.
_LATE_IN_A_ROW = 3


class Usual:
    """The usual seconds from a request to the first sign of its answer, by model and size of the request."""

    def __init__(self) -> None:
        self._means: dict[tuple[str, int], float] = {}

    def add(self, model: str, size: int, seconds: float) -> None:
        """Record the seconds until an answer or its first token."""
        key = (model, size)
        mean = self._means.get(key)
        if mean is None and len(self._means) >= _REMEMBERED:
            self._means.clear()
        self._means[key] = seconds if mean is None else mean + _WEIGHT_OF_NEW * (seconds - mean)

    def get(self, model: str, size: int) -> float | None:
        """Seconds, None while unknown."""
        return self._means.get((model, size))


class Silence:
    """The unanswered attempts for one model on one node since its last sign of life.

    `since` is when that silence began, and `longest` the longest time that one of them waited, in seconds.
    """

    def __init__(self) -> None:
        self.heard_at = float("-inf")
        self.weight = 0.0
        self.since: float | None = None
        self.longest = 0.0
        self._excused = 0

    def heard(self, now: float) -> None:
        """Record an answer or a token."""
        self.heard_at = now
        self.weight = 0.0
        self.since = None
        self.longest = 0.0
        self._excused = 0

    def excuse(self) -> bool:
        """The event loop was blocked when an attempt's time was up. Returns whether that is why no answer was seen."""
        self._excused += 1
        return self._excused <= _LATE_IN_A_ROW

    def unanswered(self, began: float, now: float, usual: float | None, options: BreakerOptions) -> bool:
        """Record an attempt that began then and got no answer. Returns whether it is evidence about the model there."""
        silent = now - max(began, self.heard_at)
        self.longest = max(self.longest, now - began)
        if self.since is None:
            self.since = now - silent
        if usual is None:
            whole = options.silence_unknown
            weight = float(silent >= whole)
        else:
            whole = max(options.silence_least, options.silence_factor * usual)
            weight = 0.0 if silent < usual else min(1.0, silent / whole)
        # Callers who waited at the same time have seen one silence, however many they were.
        self.weight = min(self.weight + weight, (now - self.since) / whole)
        return weight > 0
