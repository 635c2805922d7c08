"""An event loop whose time passes only when nothing is left to do: minutes take milliseconds, and are exact."""

import asyncio
import functools
import selectors
import time
from unittest import mock


class _Selector:
    """A selector that, instead of waiting, moves the loop's clock on."""

    def __init__(self, loop):
        self._loop = loop
        self._inner = selectors.DefaultSelector()

    def select(self, timeout=None):
        events = self._inner.select(0)
        if not events:
            if timeout is None:
                raise RuntimeError("everything waits for something that will never happen")
            self._loop.now += max(0.0, timeout)
        return events

    def __getattr__(self, name):
        return getattr(self._inner, name)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Starts at an odd time, so that a mix-up with durations shows."""

    def __init__(self):
        self.now = 1000.0
        super().__init__(_Selector(self))

    def time(self):
        return self.now


def in_virtual_time(test):
    """Run an async test in a VirtualLoop; `time.monotonic` (tenacity's clock) is the loop's."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        with (
            asyncio.Runner(loop_factory=VirtualLoop) as runner,
            mock.patch.object(time, "monotonic", runner.get_loop().time),
        ):
            runner.run(test(*args, **kwargs))

    return run


def now():
    return asyncio.get_running_loop().time()
