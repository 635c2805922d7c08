"""Models of the settings whose files are damaged: named with file and remedy, and the others serve."""

import math
import shutil

import pytest

from worker_node.devices.npu_source import npu_source
from worker_node.devices.probe import DeviceInfo, Probe
from worker_node.errors import ConfigurationError, EngineUnavailable
from worker_node.manager.failed import FailedModel
from worker_node.manager.manager import ModelManager
from worker_node.models.manifest import MANIFEST_FILE, WEIGHTS_FILE
from worker_node.models.store import ModelStore
from worker_node.serving.configured import configured_models
from worker_node.serving.machine import Machine
from worker_node.settings import ModelSettings, NodeSettings

SOUND = "all-minilm-l6-v2"


@pytest.fixture
def copied(store, tmp_path):
    """A store of its own with two copies of the small embedding model, `sound` and `hurt`."""
    for name in ("sound", "hurt"):
        target = tmp_path / name
        shutil.copytree(store.get(SOUND).path, target)
        manifest = (target / MANIFEST_FILE).read_text().replace(f'"{SOUND}"', f'"{name}"')
        (target / MANIFEST_FILE).write_text(manifest)
    return tmp_path


def built(root, *names):
    settings = NodeSettings(model_store=root, models=tuple(ModelSettings(name=name) for name in names))
    with npu_source(None, emulated=False) as npu:
        return configured_models(Machine(settings, Probe((DeviceInfo("CPU"),), "test"), npu))


def cut(directory):
    weights = directory / WEIGHTS_FILE
    weights.write_bytes(weights.read_bytes()[:-1000])


DAMAGES = {
    WEIGHTS_FILE: cut,
    "tokenizer.json": lambda directory: (directory / "tokenizer.json").unlink(),
    MANIFEST_FILE: lambda directory: (directory / MANIFEST_FILE).write_text("{"),
}


@pytest.mark.parametrize("file", DAMAGES)
async def test_a_damaged_model_fails_by_its_files_name_and_the_others_serve(copied, file):
    DAMAGES[file](copied / "hurt")
    sound, hurt = built(copied, "sound", "hurt")
    assert sound.id == "sound"
    assert isinstance(hurt, FailedModel)
    assert file in hurt.reason
    assert "again" in hurt.reason
    manager = ModelManager([sound, hurt], ModelStore(copied), pytest.fail)
    assert [model.id for model in manager.models] == ["sound"]
    with pytest.raises(EngineUnavailable, match="hurt cannot be served"):
        await manager.resolve("hurt", math.inf)


async def test_a_failed_model_serves_when_its_files_were_repaired(copied):
    weights = copied / "hurt" / WEIGHTS_FILE
    whole = weights.read_bytes()
    cut(copied / "hurt")
    now = 0.0
    manager = ModelManager(built(copied, "sound", "hurt"), ModelStore(copied), pytest.fail, clock=lambda: now)
    with pytest.raises(EngineUnavailable):
        await manager.resolve("hurt", math.inf)
    weights.write_bytes(whole)
    with pytest.raises(EngineUnavailable):
        await manager.resolve("hurt", math.inf)  # not at every request
    now = 60.0
    assert (await manager.resolve("hurt", math.inf)).id == "hurt"
    assert (manager.failed, len(manager.models)) == ([], 2)


def test_a_node_with_none_of_its_models_installed_does_not_start(tmp_path):
    with pytest.raises(ConfigurationError, match="npu-node pull"):
        built(tmp_path, "all-minilm-l6-v2")


def test_one_that_is_not_installed_does_not_keep_the_others_from_serving(copied):
    sound, missing = built(copied, "sound", "smollm2-135m-instruct")
    assert sound.id == "sound"
    assert "npu-node pull smollm2-135m-instruct" in missing.reason
    assert not missing.installed
