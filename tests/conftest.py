"""Fixtures that every kind of test may use, and how the suite is run: CONTRIBUTING.md."""

import functools
import gc
import logging
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import aiohttp
import pytest
from hypothesis import settings

from tests.support import avx2, forking
from tests.support.foreign import kept, kept_directory
from tests.support.nodes import start_node
from worker_node.models.directory import MANIFEST_FILE
from worker_node.models.store import STORE_VARIABLE, ModelStore, default_store_root

avx2.use_if_wanted()
# Nodes and commands do not read the settings of this machine.
os.environ["NPU_NODE_CONFIG"] = ""
# Nor its models, except the embedded ones: `store`. Workers inherit the first variable, too.
USERS_STORE = os.environ.setdefault("TESTS_USERS_STORE", str(default_store_root()))
os.environ[STORE_VARIABLE] = str(kept_directory() / "store")
# Beside the run's own workers, which are as many as cores, engines of a lower priority would get little of any.
os.environ.setdefault("NPU_NODE_ENGINE_NICE", "0")

# The same examples in every run: a suite that fails now and then is one that nobody believes. To look for new ones:
# pytest --hypothesis-profile=default
settings.register_profile("suite", derandomize=True, deadline=None, max_examples=50)
settings.register_profile("long", derandomize=True, deadline=None, max_examples=200)
settings.load_profile("suite")


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="also the tests marked `long`, and the long forms of others")


def pytest_configure(config):
    # Nothing that is imported or collected is garbage: looking for some takes half of that time.
    gc.disable()
    if config.getoption("long") and not config.getoption("--hypothesis-profile"):
        settings.load_profile("long")
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        # Each worker and its nodes on one core: the threads of OpenVINO spin while they wait for each other.
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})


def pytest_unconfigure():
    forking.end()


def pytest_collection_modifyitems(config, items):
    """Mark what uses the embedded models `real`; without --long, leave out what is marked `long`."""
    real = {"store", "speech_store", "node", "whole_node", "npu_node"}
    for item in items:
        if not real.isdisjoint(getattr(item, "fixturenames", ())) and not item.nodeid.startswith("tests/unit/"):
            item.add_marker("real")
        if sys.platform == "win32" and item.get_closest_marker("linux"):
            item.add_marker(pytest.mark.skip("tests what Linux alone has"))
    if not config.getoption("long"):
        left_out = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish():
    gc.enable()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """One more worker than cores, since many tests wait."""
    return len(os.sched_getaffinity(0)) + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Files run as wholes, those that share a node of whole weights on one worker: each takes seconds to start."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return "whole weights" if uses_whole_weights(config.rootpath / file) else file

    return Scheduling(config, log)


@functools.cache
def uses_whole_weights(path):
    return re.search(r'\b(whole|npu)_node"?[,)]', path.read_text(encoding="utf-8")) is not None


@pytest.fixture(autouse=True)
def logging_as_imported():
    """Undo what earlier tests, the code that they ran and its imports set of logging: others read caplog."""
    if logging.root.manager.disable:
        logging.disable(logging.NOTSET)
    _set_level(logging.root, logging.WARNING)
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith(("worker_node", "backend_client")) and isinstance(logger, logging.Logger):
            _set_level(logger, logging.NOTSET)
            logger.disabled = False
            logger.propagate = True


def _set_level(logger, level):
    if logger.level != level:  # setting it empties a cache of each logger
        logger.setLevel(level)


@pytest.fixture(scope="session")
def long(request):
    return request.config.getoption("long")


@pytest.fixture(scope="session")
def users_store():
    """The user's own model store, with the embedded models in it; a test run downloads nothing when they are there."""
    store = ModelStore(Path(USERS_STORE))
    for name in embedded(store):
        store.pull(name)
    return store


def embedded(store):
    return [entry.id for entry in store.catalog.entries if entry.embedded]


def linked(users_store, names, name, add=None, recipe=""):
    """The directory `name` with hard links to these models of the user's store, and what `add` puts beside them."""

    def link(root):
        for model in names:
            shutil.copytree(users_store.get(model).path, root / model, copy_function=link_or_copy)
        if add is not None:
            add(ModelStore(root))

    manifests = [(users_store.get(model).path / MANIFEST_FILE).read_text(encoding="utf-8") for model in names]
    return kept(name, link, "".join((*manifests, recipe)))


def link_or_copy(source, target):
    try:
        os.link(source, target)
    except OSError:  # on another file system
        shutil.copyfile(source, target)


@pytest.fixture(scope="session")
def store(users_store):
    """A store with the embedded models alone: that of every node and command which is given no other one."""
    root = Path(os.environ[STORE_VARIABLE])
    models = linked(users_store, embedded(users_store), "models")
    if sys.platform == "win32":  # where a user may make no symbolic link
        os.environ[STORE_VARIABLE] = str(models)
        return ModelStore(models)
    fresh = root.with_name(f"{root.name}-{os.getpid()}")
    fresh.symlink_to(models)
    fresh.replace(root)
    return ModelStore(root)


@pytest.fixture(scope="session")
def speech_store(users_store):
    """As `store`, with Whisper and the network that finds speech."""
    from tests.support.whisper import __file__ as recipe
    from tests.support.whisper import install_whisper
    from worker_node.tasks.transcribe.task import VOICE_MODEL

    users_store.pull(VOICE_MODEL)
    names = (*embedded(users_store), VOICE_MODEL)
    return ModelStore(linked(users_store, names, "speech-models", install_whisper, Path(recipe).read_text("utf-8")))


@pytest.fixture(scope="session")
def quick_models(store):
    """The environment of a node whose generation model is cut to two layers: where no sensible answer is needed."""
    from tests.support.cut_model import quick_store

    return {"NPU_NODE_MODEL_STORE": str(quick_store(store))}


@pytest.fixture(scope="session")
def node(quick_models):
    """A real node, shared by all tests that leave it as they found it.

    Its generation model is cut to two layers: six times quicker, and no answer makes sense (`tests/support/cut_model`).
    """
    with start_node(**quick_models) as running:
        yield running


@pytest.fixture(scope="session")
def whole_node(store):
    """As `node`, with the whole generation model: for what needs its words."""
    with start_node() as running:
        yield running


@pytest.fixture(scope="session")
def npu_node(store, tmp_path_factory):
    """As `whole_node`, with both models on the emulated NPU first, in short shapes. It may load on the CPU too."""
    config = tmp_path_factory.mktemp("npu") / "node.toml"
    config.write_text(
        """
        [[models]]
        name = "all-minilm-l6-v2"
        npu_buckets = [32, 64, 128, 256]
        infer_requests = 2

        [[models]]
        name = "smollm2-135m-instruct"
        max_prompt_len = 64
        min_response_len = 64
        cache_size_gb = 1
        max_tokens_limit = 160
        """
    )
    # Half a minute where the compiled model is not in the cache: the shapes of the NPU are compiled.
    # No canary comes between two requests: tests read the busy time before and after.
    environment = {
        "NPU_NODE_NPU_EMULATION": "1",
        "NPU_NODE_CANARY_INTERVAL_S": "86400",
    }
    with start_node("--config", str(config), ready=False, **environment) as running:
        running.wait_for(lambda body: body["status"] == "ready", timeout=240)
        yield running


@pytest.fixture
async def http():
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
def interruptible():
    """Processes started here heed SIGINT, even where the suite itself was started in the background and ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
