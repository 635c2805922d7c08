"""The settings of the bounded profile, its model and its lock."""

import argparse
import hashlib
import json
import shutil
from dataclasses import replace

import pytest

from tests.support.published import install
from worker_node.bounded.jobs import BoundedJob, bounded
from worker_node.bounded.profile import job_service
from worker_node.bounded.service import (
    PUBLISHED_NAME,
    REFERENCE_MODEL,
    Choice,
    Identity,
    build,
    choose_model,
    identify,
    reservation,
)
from worker_node.bounded.settings import BoundedSettings, DeviceLock
from worker_node.cli.serve import load_bounded_settings
from worker_node.core.errors import BadRequest, ConfigurationError, EngineUnavailable
from worker_node.core.operating_system import lock as lock_file
from worker_node.core.types import Device, ModelKind
from worker_node.devices.npu import NpuSource
from worker_node.devices.probe import DeviceInfo, Probe
from worker_node.models.catalog import Catalog
from worker_node.models.directory import MANIFEST_FILE, InstalledModel
from worker_node.models.store import ModelStore
from worker_node.serving.build import Machine
from worker_node.settings import NodeSettings
from worker_node.tasks.generate import building

ANY = "0.0.0.0"  # noqa: S104  (it is what must be refused)


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    for name in ("MODEL", "BLOBS", "CACHE", "HOST", "PORT", "LOCK", "LOCK_WAIT_S"):
        monkeypatch.delenv(f"OV_GENAI_NPU_{name}", raising=False)


def test_the_defaults_are_those_of_the_contract():
    settings = BoundedSettings()
    assert (settings.host, settings.port, settings.model) == ("127.0.0.1", 18820, None)
    node = settings.node_settings()
    (model,) = node.models
    assert (node.host, node.port) == ("127.0.0.1", 18820)
    assert (model.options["max_prompt_len"], model.options["min_response_len"]) == (1024, 64)
    assert (model.options["prefill_hint"], model.options["generate_hint"]) == ("DYNAMIC", "FAST_COMPILE")
    assert [place.device for place in model.placements] == ["NPU"]


def test_the_environment_is_the_contracts(monkeypatch, tmp_path):
    for name, value in {"MODEL": tmp_path / "m", "CACHE": tmp_path / "c", "HOST": "localhost", "PORT": 1234}.items():
        monkeypatch.setenv(f"OV_GENAI_NPU_{name}", str(value))
    monkeypatch.setenv("NPU_NODE_COMPILE_CACHE", str(tmp_path / "node"))
    settings = BoundedSettings()
    assert (settings.model, settings.cache) == (tmp_path / "m", tmp_path / "c")
    monkeypatch.delenv("OV_GENAI_NPU_CACHE")
    assert BoundedSettings().cache == tmp_path / "node"
    monkeypatch.setenv("OV_GENAI_NPU_CACHE", str(tmp_path / "c"))
    node = settings.node_settings()
    assert (node.host, node.port, node.compile_cache) == ("127.0.0.1", 1234, tmp_path / "c")


@pytest.mark.parametrize(
    "host", [ANY, "::", "::1", "127.0.0.2", "127.1", "2130706433", "", "192.168.1.5", "example.org", "localhost."]
)
def test_any_other_address_is_refused_whatever_else_is_set(host, monkeypatch):
    monkeypatch.setenv("NPU_NODE_ALLOW_UNAUTHENTICATED", "true")
    monkeypatch.setenv("NPU_NODE_API_KEYS", "key-0123456789abcdef")
    with pytest.raises(ConfigurationError, match=r"127\.0\.0\.1 only"):
        BoundedSettings(host=host).node_settings()


def test_settings_that_are_wrong_are_explained(monkeypatch):
    monkeypatch.setenv("OV_GENAI_NPU_PORT", "many")
    with pytest.raises(ConfigurationError, match="port"):
        load_bounded_settings(argparse.Namespace())
    monkeypatch.delenv("OV_GENAI_NPU_PORT")
    assert load_bounded_settings(argparse.Namespace(port=0)).port == 0
    monkeypatch.setenv("NPU_NODE_LOAD_TIMEOUT_S", "soon")
    with pytest.raises(ConfigurationError, match="load_timeout_s"):
        load_bounded_settings(argparse.Namespace())
    with pytest.raises(ConfigurationError, match="--config"):
        load_bounded_settings(argparse.Namespace(config="node.toml"))


@pytest.mark.parametrize("name", ["", "nothing"])
def test_a_directory_that_holds_no_model_is_a_problem(tmp_path, name):
    choice = choose_model(tmp_path / name, ModelStore(tmp_path))
    assert choice.installed is None
    assert str(tmp_path / name) in choice.problem


@pytest.mark.real
def test_the_reference_model_comes_first(store, tmp_path):
    for name in ("smollm2-135m-instruct", "qwen2.5-1.5b-instruct"):
        (tmp_path / name).symlink_to(store.get("smollm2-135m-instruct").path)
    choice = choose_model(None, ModelStore(tmp_path))
    assert choice.path.name == "qwen2.5-1.5b-instruct"
    # The name alone proves nothing.
    assert choice.identity is Identity.OTHER


def as_reference(source, directory, **config):
    """A copy of a model without a manifest that calls itself what the reference model is."""
    shutil.copytree(source, directory)
    (directory / MANIFEST_FILE).unlink()
    said = json.loads((directory / "config.json").read_text())
    known = Catalog.load().find(REFERENCE_MODEL).config
    (directory / "config.json").write_text(json.dumps(said | known | config))
    return directory


@pytest.mark.real
@pytest.mark.parametrize(
    ("config", "identity", "known_identity"),
    [
        ({}, Identity.COMPATIBLE, Identity.PUBLISHED),
        ({"num_hidden_layers": 24}, Identity.OTHER, Identity.OTHER),
    ],
)
def test_a_model_is_the_reference_by_its_content(store, tmp_path, config, identity, known_identity):
    directory = as_reference(store.get("smollm2-135m-instruct").path, tmp_path / "anything", **config)
    found = hashlib.sha256((directory / "openvino_model.bin").read_bytes()).hexdigest()
    choice = choose_model(directory, store)
    assert choice.identity is identity
    assert f"npu-node pull {REFERENCE_MODEL}" in reservation(choice)
    pulled = replace(choice.installed, source=f"hub {PUBLISHED_NAME}@main", source_sha256={"openvino_model.bin": found})
    assert identify(pulled) is known_identity
    named = choose_model(directory, store, BoundedSettings(weights=f"{'0' * 64},{found}").weights.split(","))
    assert named.identity is known_identity
    assert (reservation(named) is None) is (known_identity is Identity.PUBLISHED)


@pytest.mark.real
def test_the_published_directory_is_converted_under_its_name_and_found(store, tmp_path):
    source = store.get("smollm2-135m-instruct").path
    mine = ModelStore(tmp_path / "store")
    other = tmp_path / "other" / "Qwen2.5-1.5B-Instruct-int4-ov"
    shutil.copytree(source, other)
    with pytest.raises(BadRequest, match="is llama, 30 layers, 576 wide"):
        install(mine, other)
    named = as_reference(source, tmp_path / "Qwen2.5-1.5B-Instruct-int4-ov")
    with pytest.raises(BadRequest, match="belongs to hub OpenVINO"):
        install(mine, named, "qwen2.5-1.5b-instruct")
    install(mine, named)
    choice = choose_model(None, mine)
    assert choice.identity is Identity.COMPATIBLE
    assert choice.installed.id == "qwen2.5-1.5b-instruct-int4-ov"


@pytest.mark.parametrize("identity", [Identity.PUBLISHED, Identity.COMPATIBLE, Identity.OTHER])
def test_weights_that_are_not_for_npus_are_a_warning_for_the_reference_model_alone(
    tmp_path, monkeypatch, caplog, identity
):
    monkeypatch.setattr(building, "ChatTokenizer", lambda *_: None)
    for name in ("openvino_model.xml", "openvino_model.bin"):
        (tmp_path / name).write_bytes(b"1")
    installed = InstalledModel("reference", ModelKind.GENERATION, tmp_path, 32768, "int4_asym", "qwen")
    probe = Probe((DeviceInfo("NPU", {"NPU_DRIVER_VERSION": "1.32"}),), "2026.4")
    npu = NpuSource(emulated=False, busy_counter=tmp_path / "busy", stand_in=False)
    machine = Machine(NodeSettings(compile_cache=tmp_path / "compiled"), probe, npu)
    choice = Choice(tmp_path, "given", installed, identity=identity)
    lock = DeviceLock(tmp_path / "lock", 1)
    if identity is Identity.OTHER:
        with pytest.raises(ConfigurationError, match="an NPU takes symmetric ones"):
            build(choice, machine, lock, examined=True)
        return
    (model,) = build(choice, machine, lock, examined=True)
    assert [place.device for place in model.placements] == [Device.NPU]
    assert "reference is used on the NPU all the same: its weights are int4_asym" in caplog.text


@pytest.mark.real
async def test_an_unusable_answer_is_asked_for_once_more(store, tmp_path, monkeypatch):
    monkeypatch.setenv("NPU_NODE_NPU_EMULATION", "1")
    settings = BoundedSettings(model=store.get("smollm2-135m-instruct").path, cache=tmp_path, lock=tmp_path / "lock")
    seen = []
    job = BoundedJob("title", 32, "Answer.", "Answer.", lambda text: seen.append(text) or "")
    async with job_service(settings) as service:
        result = await service.run(bounded(job, "Rain", 4))
    assert len(seen) == 2
    assert result.payload["npu_busy_delta_us"] > 0
    assert "no usable text" in result.error


@pytest.mark.real
def test_a_model_of_a_short_context_is_a_problem_whose_remedy_the_profile_has(store, tmp_path):
    directory = tmp_path / "short"
    shutil.copytree(store.get("smollm2-135m-instruct").path, directory)
    (directory / MANIFEST_FILE).unlink()
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    choice = choose_model(directory, store)
    assert choice.installed is None
    assert "512 tokens, and the jobs need 1024; set OV_GENAI_NPU_MODEL" in choice.problem


@pytest.mark.real
def test_a_model_that_embeds_is_a_problem(store):
    choice = choose_model(store.get("all-minilm-l6-v2").path, store)
    assert choice.installed is None
    assert "embeds" in choice.problem


def test_a_lock_file_that_cannot_be_opened_is_a_problem(tmp_path):
    assert DeviceLock(tmp_path / "lock", 1.0).problem() is None
    assert "set OV_GENAI_NPU_LOCK" in DeviceLock(tmp_path / "missing" / "lock", 1.0).problem()


async def test_waiting_is_bounded_for_other_processes_and_for_our_own_jobs(tmp_path):
    path = tmp_path / "lock"
    lock = DeviceLock(path, 0.05)
    with path.open("a") as other:
        lock_file(other)
        with pytest.raises(EngineUnavailable, match=r"busy with other jobs for 0\.05 s") as caught:
            async with lock.held():
                pass
    assert caught.value.status == 503
    async with lock.held():
        with pytest.raises(EngineUnavailable):
            async with lock.held():
                pass
    async with lock.held():
        pass
