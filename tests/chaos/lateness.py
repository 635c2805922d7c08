"""How much of a call's lateness is the machine's: the time that this thread was ready to run and got no core."""

import asyncio
import bisect
import sys
import threading
import time
import traceback
from pathlib import Path

_TICK_S = 0.005
# A turn of the loop that takes longer is looked at.
_LONG_TURN_S = 0.03


class Lateness:
    """Measures delays of the event loop's thread that no code in it caused. Make it in that thread.

    Two kinds count: waiting for a core, which Linux counts for each thread, and the stalls that a run injects. Anything
    else that keeps the loop busy, be it the client's work or this harness's, is not excused.
    """

    def __init__(self):
        self._schedstat = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._times, self._waits = [time.monotonic()], [self._waited()]
        self._stalls = []
        self._thread = threading.get_ident()
        self._stopped = threading.Event()
        self._seen = []
        self.longest_wait = 0.0

    def _waited(self):
        """Seconds in all that this thread waited for a core."""
        return int(self._schedstat.read_text().split()[1]) / 1e9

    async def watch(self):
        """Take the time waited at every tick; run it while calls are made."""
        looking = threading.Thread(target=self._look, name="chaos: looks at long turns")
        looking.start()
        try:
            while True:
                now, waited = time.monotonic(), self._waited()
                self.longest_wait = max(self.longest_wait, waited - self._waits[-1])
                self._times.append(now)
                self._waits.append(waited)
                await asyncio.sleep(_TICK_S)
        finally:
            self._stopped.set()
            looking.join()

    def _look(self):
        while not self._stopped.wait(_LONG_TURN_S / 3):
            if (now := time.monotonic()) - self._times[-1] > _LONG_TURN_S:
                frame = sys._current_frames()[self._thread]
                own = [f"{f.filename.rpartition('/')[2]}:{f.lineno} {f.name}" for f in traceback.extract_stack(frame)]
                self._seen.append((now, " < ".join(reversed(own[-4:]))))

    def blocked_by(self, began, ended):
        """What the loop was seen doing in long turns between two times."""
        return [f"{at - began:+.3f} s {what}" for at, what in self._seen if began <= at <= ended]

    def stalled(self, began, ended):
        """Note that the loop was blocked on purpose."""
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
