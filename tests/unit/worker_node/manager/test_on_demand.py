"""Models that are only installed: looked up within the deadline of who asks, a bounded number at a time, built once.

The disk is scripted: a look-up waits in its thread until the test lets it go on. Time jumps.
"""

import asyncio
import math
import threading
import time
from types import SimpleNamespace

import pytest

from tests.support.scripted_engines import scripted_model
from tests.unit.worker_node.manager.jumping import run_jumping
from worker_node.core.errors import DeadlineExceeded, ModelNotFound, Overloaded
from worker_node.manager.manager import ModelManager
from worker_node.models.store import ModelStore


class Disk:
    """A store and the building of its models, which take until `go`."""

    def __init__(self, root):
        self.store = ModelStore(root)
        self.store.get = self.get
        self.root = root
        self.go = threading.Event()
        self.begun = threading.Event()
        self.builds, self.looks = [], []
        self.waits = {"get", "build"}

    def wait(self, what):
        if what in self.waits:
            self.begun.set()
            self.go.wait()

    def get(self, name, _served):
        self.looks.append(name)
        self.wait("get")
        if not (self.root / name).is_dir():
            raise ModelNotFound(f"model {name} is not installed")
        return SimpleNamespace(id=name, path=self.root / name)

    def build(self, installed):
        self.builds.append(installed.id)
        self.wait("build")
        return scripted_model(installed.id, [], time.monotonic, path=installed.path)


@pytest.fixture
def disk(tmp_path):
    disk = Disk(tmp_path)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "npu-node.json").write_text("{}")
    yield disk
    disk.go.set()


def simulate(scenario, disk):
    async def main():
        loop = asyncio.get_running_loop()
        manager = ModelManager((), disk.store, disk.build, clock=loop.time)
        try:
            await scenario(loop, manager)
        finally:
            disk.go.set()
            await manager.stop()

    run_jumping(main)


async def begun(event):
    while not event.is_set():
        await asyncio.sleep(0)


@pytest.mark.parametrize("slow", ["get", "build"])
def test_a_look_up_ends_by_the_deadline_and_goes_on_for_who_asks_again(disk, slow):
    disk.waits = {slow}

    async def scenario(loop, manager):
        began = loop.time()
        for _ in range(3):
            with pytest.raises(DeadlineExceeded, match="while the files of models were read"):
                await manager.resolve("one", loop.time() + 5)
        assert loop.time() - began == pytest.approx(15)
        disk.go.set()
        assert (await manager.resolve("one", math.inf)).id == "one"
        assert disk.builds == ["one"], "what was begun was not thrown away"

    simulate(scenario, disk)


def test_many_callers_of_one_model_are_one_look_up_and_one_build(disk):
    async def scenario(_loop, manager):
        callers = [asyncio.create_task(manager.resolve("one", math.inf)) for _ in range(100)]
        await begun(disk.begun)
        late = [asyncio.create_task(manager.resolve("one", math.inf)) for _ in range(100)]
        await asyncio.sleep(0)
        disk.go.set()
        assert {model.id for model in await asyncio.gather(*callers, *late)} == {"one"}

    simulate(scenario, disk)
    assert disk.builds == ["one"]
    assert len(disk.looks) == 1


def test_look_ups_of_many_names_are_bounded_and_what_is_served_is_found_all_the_same(disk):
    async def scenario(loop, manager):
        manager.add(scripted_model("served", [], time.monotonic))
        waiting = [asyncio.create_task(manager.resolve(f"name-{n}", math.inf)) for n in range(32)]
        await begun(disk.begun)
        with pytest.raises(Overloaded, match="the disk of this node is slow") as refused:
            await manager.resolve("one", math.inf)
        assert refused.value.retry_after == 5
        assert (await manager.resolve("served", math.inf)).id == "served"
        disk.go.set()
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert {type(end) for end in ended} == {ModelNotFound}
        assert (await manager.resolve("one", math.inf)).id == "one"

    simulate(scenario, disk)


def test_a_model_whose_files_are_removed_while_it_is_built_is_not_served(disk):
    disk.waits = {"build"}

    async def scenario(_loop, manager):
        asking = asyncio.create_task(manager.resolve("one", math.inf))
        await begun(disk.begun)
        await manager.delete("one")
        disk.go.set()
        with pytest.raises(ModelNotFound, match="not installed"):
            await asking
        assert manager.models == ()

    simulate(scenario, disk)
