"""An event loop whose clock jumps to the next timer, so that hours pass at once and in one order."""

import asyncio
import inspect
import selectors
from functools import partial

import pytest

from worker_node.manager.manager import ModelManager
from worker_node.models.store import ModelStore


class JumpingLoop(asyncio.SelectorEventLoop):
    """A loop that has nothing to wait for but timers: instead of waiting it sets its clock on."""

    def __init__(self):
        self.now = 1000.0
        super().__init__(_JumpingSelector(self))

    def time(self):
        return self.now

    async def shutdown_default_executor(self, timeout=None):
        """Without the limit that Python 3.12 has: it would have passed before a thread ends."""
        await super().shutdown_default_executor()


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, loop):
        super().__init__()
        self._loop = loop

    def select(self, timeout=None):
        if timeout:
            self._loop.now += timeout
        return super().select(0)


def run_jumping(scenario):
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(scenario())


def run_in(make, scenario):
    """Run a scenario in the world that `make` gives, whose manager is stopped in the end and leaves no process."""

    async def main():
        world = make()
        try:
            await world.begin()
            await scenario(world)
        finally:
            await world.manager.stop()
        assert not world.machine.memory, "a process was left behind"

    run_jumping(main)


def in_worlds_of(make):
    """A decorator of tests in a world: `make` gets its options, and those of a test's arguments that it names."""

    def in_world(**options):
        def decorate(test):
            def run(**given):
                known = {name: given[name] for name in inspect.signature(make).parameters if name in given}
                run_in(partial(make, **known, **options), lambda world: test(world, **given))

            run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
            arguments = list(inspect.signature(test).parameters.values())[1:]
            run.__signature__ = inspect.Signature(arguments)
            return run

        return decorate

    return in_world


def manager_over(models, machine, clock, budget=None):
    return ModelManager(models, ModelStore(), pytest.fail, {"host": budget}, clock=clock, measure=machine.measure)
