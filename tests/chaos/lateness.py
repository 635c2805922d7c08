"""How much of a call's lateness is the machine's: the time that this thread was ready to run and got no core."""

import asyncio
import bisect
import threading
import time
from pathlib import Path

_TICK_S = 0.005


class Lateness:
    """Measures delays of the event loop's thread that no code in it caused. Make it in that thread.

    Two kinds count: waiting for a core, which Linux counts for each thread, and the stalls that a run injects. Anything
    else that keeps the loop busy, be it the client's work or this harness's, is not excused.
    """

    def __init__(self):
        self._schedstat = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._times, self._waits = [time.monotonic()], [self._waited()]
        self._stalls = []
        self.longest_wait = 0.0

    def _waited(self):
        """Seconds in all that this thread waited for a core."""
        return int(self._schedstat.read_text().split()[1]) / 1e9

    async def watch(self):
        """Take the time waited at every tick; run it while calls are made."""
        while True:
            now, waited = time.monotonic(), self._waited()
            self.longest_wait = max(self.longest_wait, waited - self._waits[-1])
            self._times.append(now)
            self._waits.append(waited)
            await asyncio.sleep(_TICK_S)

    def stalled(self, began, ended):
        self._stalls.append((began, ended))

    def excused(self, deadline, ended):
        """Seconds between a deadline and the end of its call that the machine or an injected stall took."""
        if ended <= deadline:
            return 0.0
        # The last tick before the deadline: what was waited since then may lie before it by one tick, not more, unless
        # the loop was blocked all the time.
        before = self._waits[max(0, bisect.bisect_right(self._times, deadline) - 1)]
        stalls = sum(max(0.0, min(ended, until) - max(deadline, since)) for since, until in self._stalls)
        return self._waited() - before + stalls
