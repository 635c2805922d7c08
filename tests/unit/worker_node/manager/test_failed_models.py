"""Models of the settings whose files are damaged: named with file and remedy, and the others serve."""

import asyncio
import json
import math
import os
import shutil
from functools import partial
from types import SimpleNamespace

import pytest

from worker_node.core.errors import EngineUnavailable, HubUnreachable, ModelNotFound
from worker_node.core.types import ModelKind
from worker_node.devices.npu import npu_source
from worker_node.devices.probe import DeviceInfo, Probe
from worker_node.engines.protocol import EngineState
from worker_node.manager.manager import ModelManager
from worker_node.manager.served import FailedModel
from worker_node.models.directory import MANIFEST_FILE, WEIGHTS_FILE
from worker_node.models.progress import Progress
from worker_node.models.store import ModelStore
from worker_node.serving.build import Machine, build_on_demand, configured_models
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


def machine(root, *names, **options):
    settings = NodeSettings(model_store=root, models=tuple(ModelSettings(name=name, **options) for name in names))
    with npu_source(None, emulated=False) as npu:
        return Machine(settings, Probe((DeviceInfo("CPU"),), "test"), npu)


def built(root, *names, **options):
    return configured_models(machine(root, *names, **options))


def cut(directory):
    weights = directory / WEIGHTS_FILE
    weights.write_bytes(weights.read_bytes()[:-1000])


def lose_manifest(directory, **also):
    (directory / MANIFEST_FILE).write_text("{")
    for name, content in also.items():
        (directory / f"{name}.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("file", "damage", "kind"),
    [
        (WEIGHTS_FILE, cut, ModelKind.EMBEDDING),
        ("tokenizer.json", lambda directory: (directory / "tokenizer.json").unlink(), ModelKind.EMBEDDING),
        (MANIFEST_FILE, lose_manifest, None),
        (MANIFEST_FILE, partial(lose_manifest, modules=[]), ModelKind.EMBEDDING),
        (MANIFEST_FILE, partial(lose_manifest, config={"architectures": ["BertModel"]}), ModelKind.EMBEDDING),
        (MANIFEST_FILE, partial(lose_manifest, config={"architectures": ["LlamaForCausalLM"]}), ModelKind.GENERATION),
    ],
)
async def test_a_damaged_model_fails_by_its_files_name_keeps_its_kind_and_the_others_serve(copied, file, damage, kind):
    damage(copied / "hurt")
    sound, hurt = built(copied, "sound", "hurt")
    assert sound.id == "sound"
    assert isinstance(hurt, FailedModel)
    assert f"{os.sep}{file}: " in hurt.reason
    assert "again" in hurt.reason
    assert hurt.kind == kind
    manager = ModelManager([sound, hurt], ModelStore(copied), pytest.fail)
    assert [model.id for model in manager.models] == ["sound"]
    with pytest.raises(EngineUnavailable, match="hurt cannot be served: ") as caught:
        await manager.resolve("hurt", math.inf)
    assert "_Damaged" not in caught.value.message


async def test_a_model_of_the_catalog_keeps_its_kind_and_names_without_any_file(copied):
    sound, missing = built(copied, "sound", "smollm2-135m-instruct")
    assert missing.kind == ModelKind.GENERATION
    for name in ("smollm2-135m-instruct", "smollm2"):
        assert missing.answers_to(name)
    manager = ModelManager([sound, missing], ModelStore(copied), pytest.fail)
    with pytest.raises(EngineUnavailable, match="npu-node pull smollm2-135m-instruct"):
        await manager.default(ModelKind.GENERATION, math.inf)
    with pytest.raises(ModelNotFound, match="serves no rerank model"):
        await manager.default("rerank", math.inf)


async def test_a_deleted_model_of_the_settings_is_failed_until_it_is_pulled_again(copied, monkeypatch):
    model, other = built(copied, "sound", "hurt")
    kept = copied.parent / f"{copied.name} kept"
    shutil.copytree(copied / "sound", kept)

    async def pull(_root, _spelling, _progress):
        shutil.move(kept, copied / "sound")

    monkeypatch.setattr("worker_node.manager.manager.pull", pull)
    spec = SimpleNamespace(model_id="sound", name="sound")
    monkeypatch.setattr(ModelStore, "pull_spec", lambda _store, _name: spec)
    monkeypatch.setattr(ModelStore, "find", lambda _store, _spec: None)
    manager = ModelManager([model, other], ModelStore(copied), pytest.fail)
    await manager.delete("sound")
    [failed] = manager.failed
    assert (failed.name, failed.kind, failed.reason.endswith("npu-node pull sound")) == ("sound", "embedding", True)
    with pytest.raises(EngineUnavailable, match="sound cannot be served"):
        await manager.resolve("sound", math.inf)
    await manager.pull("sound", Progress())
    assert manager.failed == []
    assert [served.id for served in manager.models] == ["sound", "hurt"], "in the settings' order"


async def test_a_pull_that_reaches_no_hub_fails_with_a_code_of_its_own_and_the_model(copied, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    manager = ModelManager([], ModelStore(copied), pytest.fail)
    with pytest.raises(HubUnreachable) as failed:
        await manager.pull("maker/tiny", Progress())
    assert (failed.value.code, failed.value.status, failed.value.model) == ("hub_unreachable", 424, "tiny")


@pytest.mark.parametrize("configured", [True, False])
async def test_a_model_whose_files_have_changed_is_read_again_instead_of_loaded(copied, configured):
    models = built(copied, "sound", "hurt", placements=[{"device": "CPU", "load": "lazy"}])
    manager = ModelManager(models if configured else [], ModelStore(copied), partial(build_on_demand, machine(copied)))
    manager.start()
    try:
        model = await manager.resolve("hurt", math.inf)
        weights = copied / "hurt" / WEIGHTS_FILE
        weights.write_bytes(weights.read_bytes())
        manager.request_load(model)
        async with asyncio.timeout(60):
            while (found := await manager.resolve("hurt", math.inf)) is model:
                await model.placements[0].engine.next_change()
        assert found.placements[0].state is EngineState.UNLOADED, "and not loaded unasked"
        assert [served.id for served in manager.models] == (["sound", "hurt"] if configured else ["hurt"])
        assert manager.failed == []
    finally:
        await manager.stop()


async def test_a_model_whose_files_are_gone_says_where_they_were_and_how_to_get_them_back(copied):
    models = built(copied, "hurt", placements=[{"device": "CPU", "load": "lazy"}])
    manager = ModelManager(models, ModelStore(copied), partial(build_on_demand, machine(copied)))
    manager.start()
    try:
        model = await manager.resolve("hurt", math.inf)
        shutil.rmtree(copied / "hurt")
        manager.request_load(model)
        async with asyncio.timeout(60):
            while not manager.failed:
                await asyncio.sleep(0.01)
        assert manager.failed[0].reason == (
            f"its files in {copied / 'hurt'} have changed, and could not be read again; repair them, or install it "
            "again: npu-node pull hurt"
        )
    finally:
        await manager.stop()


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
