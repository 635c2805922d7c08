"""Engines without processes, over any clock: they load in a given time, fail when told to, and note what is done."""

import asyncio
from types import SimpleNamespace

from worker_node.core.types import Device, ModelKind
from worker_node.engines.protocol import EngineState, EngineStatus
from worker_node.manager.placement import Placement
from worker_node.manager.served import Activity, ServedModel
from worker_node.scheduling.admission import Admission, AdmissionLimits


class Machine:
    """What all scripted engines share: the memory that their processes take, and who compiles on which device."""

    def __init__(self):
        self.memory = {}
        self.compiling = {}
        self.events = []
        self._pids = iter(range(1, 10**9))

    def process(self, size):
        pid = next(self._pids)
        self.memory[pid] = size
        return pid

    def measure(self, pid):
        return self.memory.get(pid)


class ScriptedEngine:
    """Loads in `load_s` seconds into `size` bytes. `failures` is consumed by loads: true ones fail."""

    recoveries = 0

    def __init__(self, name, device, machine, *, size=100, load_s=1.0, failures=()):
        self.name, self.device, self.machine = name, device, machine
        self.size, self.load_s = size, load_s
        self.failures = list(failures)
        self.state = EngineState.UNLOADED
        self.pid = None
        self.in_flight = 0
        self.loads = 0
        self._changed = asyncio.Event()
        self._task = None

    @property
    def ready(self):
        return self.state is EngineState.READY

    @property
    def status(self):
        return EngineStatus(self.state, str(self.state), pid=self.pid, in_flight=self.in_flight)

    def _set(self, state):
        self.state = state
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def next_change(self):
        return self._changed.wait()

    def wake(self):
        if self.state is EngineState.UNLOADED:
            self.loads += 1
            self.pid = self.machine.process(self.size)
            self._set(EngineState.STARTING)
            self._task = asyncio.ensure_future(self._load())

    async def _load(self):
        others = self.machine.compiling.setdefault(self.device, set())
        others.add(self.name)
        self.machine.events.append(("load", self.name, self.device, len(others)))
        try:
            await asyncio.sleep(self.load_s)
        finally:
            others.discard(self.name)
        if self.failures and self.failures.pop(0):
            self._end(EngineState.FAILED)
        else:
            self._set(EngineState.READY)

    def _end(self, state):
        self.machine.memory.pop(self.pid, None)
        self.pid = None
        self._set(state)

    async def run(self, job, result):
        """Answer at once."""
        yield result(id=job.id)

    async def settled(self):
        while self.state is EngineState.STARTING:
            await self.next_change()
        return self.status

    async def unload(self):
        if self.state in {EngineState.STARTING, EngineState.UNLOADED, EngineState.STOPPED} or self.in_flight:
            return False
        self.machine.events.append(("unload", self.name, self.device, None))
        self._end(EngineState.UNLOADED)
        return True

    async def stop(self, _reason=""):
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._end(EngineState.STOPPED)


def scripted_model(name, engines, clock, *, pinned=False, estimate=None, idle_unload_s=None, aliases=(), path=None):
    """A served model with these engines, in this order; the first of a `pinned` one is loaded at start-up."""
    installed = SimpleNamespace(id=name, kind=ModelKind.GENERATION, path=path, aliases=())
    placements = [
        Placement(
            Device(engine.device),
            engine,
            Admission(name, AdmissionLimits(8), clock=clock),
            1000,
            1000,
            eager=pinned and index == 0,
            estimate=engine.size if estimate is None else estimate,
            pinned=pinned and index == 0,
            clock=clock,
        )
        for index, engine in enumerate(engines)
    ]
    return ServedModel(
        installed, placements=placements, aliases=aliases, idle_unload_s=idle_unload_s, activity=Activity(clock)
    )
