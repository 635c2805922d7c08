"""Reload under load: fifty valid and broken files, and no request is lost. Engines are scripted, time jumps."""

import asyncio
import math
import random

import pytest

from tests.support.scripted_engines import Machine, ScriptedEngine, scripted_model
from tests.unit.worker_node.manager.jumping import in_worlds_of, manager_over
from worker_node.core.errors import ConfigurationError, InsufficientMemory, ModelNotFound
from worker_node.engines.protocol import EngineState
from worker_node.manager.served import FailedModel
from worker_node.node import Reloader, follow_changes
from worker_node.settings.reading import SettingsSource

BROKEN = (
    "[[models]]\nname = ",
    '[[models]]\nname = "always"\nmax_outstandig = 3\n',
    '[[models]]\nname = "always"\n[[models]]\nname = "missing"\n',
    "prot = 1\n",
)


def text(models, **settings):
    lines = [f"{name} = {value}" for name, value in settings.items()]
    for name, options in models.items():
        lines += ["[[models]]", f'name = "{name}"', *(f"{key} = {value}" for key, value in options.items())]
    return "\n".join(lines) + "\n"


class Node:
    """What a reload needs of a node."""

    def __init__(self, settings, manager):
        self.settings, self.manager = settings, manager
        self.adopted = []

    def adopt(self, settings):
        self.settings = settings
        self.adopted.append(settings)


class World:
    """A node's manager and reloader over a settings file that the test writes."""

    def __init__(self, tmp_path, budget=None):
        self.clock, self.file = asyncio.get_running_loop().time, tmp_path / "node.toml"
        self.machine = Machine()
        self.broken_models = set()
        self.write({"always": {}})
        self.source = SettingsSource(self.file)
        settings = self.source.read()
        built = [self.build(model) for model in settings.models]
        self.manager = manager_over(built, self.machine, self.clock, budget)
        self.node = Node(settings, self.manager)
        self.reloader = Reloader(self.node, self.source, self.build, memory=110)
        self.manager.start()

    async def begin(self):
        await asyncio.sleep(5)

    def write(self, models, **settings):
        self.file.write_text(text(models, **settings))

    def build(self, wanted):
        if wanted.name == "missing":
            return FailedModel(wanted.name, "node.toml, line 4: missing is not installed", pytest.fail)
        failures = [wanted.name in self.broken_models]
        engine = ScriptedEngine(wanted.name, "CPU", self.machine, load_s=3.0, failures=failures)
        return scripted_model(
            wanted.name, [engine], self.clock, pinned=True, idle_unload_s=wanted.idle_unload_s, aliases=wanted.aliases
        )

    async def request(self, name, work_s):
        model = await self.manager.resolve(name, math.inf)
        with model.activity.working():
            placement = model.placements[0]
            while placement.engine.state is not EngineState.READY:
                placement.request_load(on_request=True, insist=False)
                await placement.settled(self.clock() + 60)
            await asyncio.sleep(work_s)
            assert placement.engine.state is EngineState.READY, "the engine was taken from a request"


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """What runs in threads runs at once: the clock must not jump meanwhile. A collection looks at all that a worker of
    the suite holds: a tenth of a second."""

    async def inline(function, *arguments):
        return function(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", inline)
    monkeypatch.setattr("worker_node.manager.replacement.gc.collect", lambda: None)


in_world = in_worlds_of(World)


@pytest.mark.parametrize("budget", [None, 250, 110], ids=["much memory", "for two", "for one"])
@in_world()
async def test_fifty_reloads_under_load_lose_no_request(world, tmp_path, long, budget):
    rng = random.Random(3)
    done, stop = [], asyncio.Event()

    async def caller(name):
        while not stop.is_set():
            try:
                await world.request(name, rng.choice([0.0, 0.5, 4.0]))
                done.append(name)
            except ModelNotFound:
                assert name == "sometimes", "a model that every file names is always found"
            await asyncio.sleep(0.2)

    names = ["always", "always", *(["sometimes"] if budget != 110 else [])]
    callers = [asyncio.create_task(caller(name)) for name in names]
    outcomes = set()
    for number in range(500 if long else 50):
        if rng.random() < 0.4:
            world.file.write_text(rng.choice(BROKEN))
            with pytest.raises(ConfigurationError, match=r"node\.toml"):
                await world.reloader.reload()
            outcomes.add("rejected")
        else:
            models = {"always": {"max_outstanding": number + 1} if rng.random() < 0.5 else {}}
            if rng.random() < 0.5 and "sometimes" in names:
                models["sometimes"] = {"idle_unload_s": rng.choice([50.0, 60.0])}
            world.write(models)
            report = await world.reloader.reload()
            assert report.restart == ()
            outcomes |= {name for name in ("added", "removed", "changed") if getattr(report, name)}
        for task in callers:
            assert not task.done(), task.exception()
        await asyncio.sleep(rng.choice([0.0, 0.5, 10.0]))
    stop.set()
    await asyncio.gather(*callers)
    assert len(done) > 50
    assert outcomes >= {"rejected", "changed"}


@in_world()
async def test_reloads_whose_callers_left_run_one_after_the_other_and_the_last_file_holds(world, tmp_path):
    for number in (1, 2, 3):
        world.write({"always": {"max_outstanding": number, "aliases": [f"file{number}"]}})
        caller = asyncio.create_task(world.reloader.reload())
        await asyncio.sleep(1)  # a load takes three seconds
        caller.cancel()
    world.write({"always": {"max_outstanding": 4, "aliases": ["file4"]}})
    assert (await world.reloader.reload()).changed == ("always",)
    assert (await world.manager.resolve("file4", math.inf)).id == "always"
    for number in (1, 2, 3):
        with pytest.raises(ModelNotFound):
            await world.manager.resolve(f"file{number}", math.inf)
    await asyncio.sleep(30)
    assert len(world.machine.memory) == 1, "one engine, and none of the earlier files' any more"


@in_world()
async def test_a_reload_sets_the_order_of_models_and_so_their_default(world, tmp_path):
    for order in (["always", "second"], ["second", "always"]):
        world.write({name: {} for name in order})
        await world.reloader.reload()
        assert [model.id for model in world.manager.models] == order
        assert world.manager.names.default("generation").id == order[0]


@in_world()
async def test_every_setting_is_applied_or_named(world, tmp_path, caplog):
    """Whichever setting a file changes, its name is in the report, and followers get what holds from now on."""
    values = {
        "api_keys": '["key-0123456789abcdef"]',
        "max_texts": 7,
        "watchdog_s": 99,
        "embedding_cache": 3,
        "unknown_fields": '"reject"',
    }
    world.write({"always": {}}, **values)
    report = await world.reloader.reload()
    assert sorted(report.applied) == ["api_keys", "max_texts", "unknown_fields"]
    assert sorted(report.restart) == ["embedding_cache", "watchdog_s"]
    (settings,) = world.node.adopted
    assert (settings.max_texts, settings.unknown_fields, settings.watchdog_s) == (7, "reject", 30.0)
    assert "need a restart of the node: embedding_cache, watchdog_s" in caplog.text.replace("watchdog_s, e", "e")


@in_world()
async def test_models_have_the_memory_of_the_file_and_without_it_what_the_machine_has(world, tmp_path):
    """Each model takes 100, and the machine has 110."""
    world.write({"always": {}}, memory_budget=250)
    await world.reloader.reload()
    world.write({"always": {}, "second": {}})
    await world.reloader.reload()
    with pytest.raises(InsufficientMemory):
        await world.request("second", 0.0)
    world.write({"always": {}, "second": {}}, memory_budget=250)
    await world.reloader.reload()
    await world.request("second", 0.0)


@in_world()
async def test_keys_stay_while_the_node_listens_where_others_reach_it(world, tmp_path):
    world.write({"always": {}}, host='"0.0.0.0"', api_keys='["key-0123456789abcdef"]')
    world.node.settings = world.source.read()
    world.write({"always": {}}, host='"127.0.0.1"')
    with pytest.raises(ConfigurationError, match=r"listens at 0\.0\.0\.0 until it is restarted"):
        await world.reloader.reload()
    assert world.node.adopted == []


@in_world()
async def test_a_file_that_sets_nothing_is_refused_where_it_set_something_before(world, tmp_path):
    before = world.manager.names.find("always")
    world.file.write_text("# node.toml\n")
    with pytest.raises(ConfigurationError, match=r"node\.toml sets nothing.* middle of being written"):
        await world.reloader.reload()
    assert world.node.adopted == []
    assert world.manager.names.find("always") is before
    await world.request("always", 0.0)


@in_world()
async def test_a_file_is_reloaded_when_it_has_changed_and_rests(world, tmp_path):
    before = world.manager.names.find("always")
    watching = asyncio.create_task(follow_changes(world.file, world.reloader, asyncio.Event()))
    await asyncio.sleep(2)
    for length in range(1, 5):
        world.file.write_text(text({"always": {}, "half-written" * length: {}}))
        await asyncio.sleep(1)
    world.file.write_text(text({"always": {}, "second": {}}))
    await asyncio.sleep(5)
    assert len(world.node.adopted) == 1, "a file that changes at every look is not read"
    assert world.manager.names.find("always") is before
    await world.request("second", 0.0)
    watching.cancel()
