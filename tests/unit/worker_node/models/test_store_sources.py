"""Models come into the store from a hub, a URL and local files, and are found by every name of their source."""

import os

import pytest

from tests.support.cross_encoders import write_tiny
from tests.support.published import WHISPER, files_of, install
from tests.support.scripted_hub import COMMIT, Repository
from worker_node.core.errors import ConfigurationError, ConversionFailed, SourceRejected
from worker_node.core.types import ModelKind
from worker_node.devices.memory import MachineMemory
from worker_node.models.catalog import Quantization
from worker_node.models.store import ModelStore, open_directory, sweep

# Each conversion is a process of its own.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("in_process")]


def test_an_encoder_of_a_hub_is_built_and_found_by_its_repository(hub, store_root, make_bert):
    hub.repositories["Maker/Tiny"] = Repository(files_of(make_bert()[0]), card={"license": "mit"})
    store = ModelStore()
    model = store.pull("hf:Maker/Tiny")
    assert (model.id, model.kind, model.licence) == ("tiny", ModelKind.EMBEDDING, "mit")
    assert model.source == f"hub Maker/Tiny@{COMMIT}"
    assert model.aliases == ("maker/tiny",)
    for name in ("tiny", "Maker/Tiny", "hf.co/maker/tiny", "https://huggingface.co/Maker/Tiny"):
        assert store.get(name) == model
    assert not [path for path in store_root.glob(".*") if path.name != ".locks" and any(path.iterdir())]
    hub.asked.clear()
    assert store.pull("maker/tiny") == model
    assert hub.asked == [], "what is installed is not asked for again"


def test_a_cross_encoder_of_a_hub_and_of_a_directory_becomes_a_reranking_model(hub, store_root, tmp_path):
    write_tiny(tmp_path / "tiny")
    (tmp_path / "tiny/pytorch_model.bin").write_bytes(b"not wanted")
    hub.repositories["maker/ranker"] = Repository(files_of(tmp_path / "tiny"), card={"license": "mit"})
    store = ModelStore()
    model = store.pull("maker/ranker")
    assert (model.id, model.kind, model.licence, model.context_limit) == ("ranker", "rerank", "mit", 64)
    assert {name for name, _ in hub.large_downloads()} == {"model.safetensors"}
    local = install(store, tmp_path / "tiny", "local")
    assert local.kind == "rerank"
    assert local.source_sha256["model.safetensors"] == model.source_sha256["model.safetensors"]


def test_two_repositories_of_one_name_need_two_names(hub, store_root, make_bert):
    for maker, options in (("one", {}), ("two", {"seed": 1})):
        hub.repositories[f"{maker}/tiny"] = Repository(files_of(make_bert(maker, **options)[0]))
    store = ModelStore()
    first = store.pull("one/tiny")
    with pytest.raises(ConversionFailed, match=r"made from hub one/tiny@.*--name"):
        store.pull("two/tiny")
    second = store.pull(store.pull_spec("two/tiny", model_id="tiny-two"))
    assert store.get("two/tiny") == second
    assert store.get("one/tiny") == first


def test_what_cannot_be_built_is_rejected_before_its_weights_come(hub, store_root, make_bert, make_gguf, monkeypatch):
    hub.repositories["maker/relative"] = Repository(files_of(make_bert(position_embedding_type="relative_key")[0]))
    with pytest.raises(SourceRejected, match=r"position_embedding_type = 'relative_key'.*optimum-cli export openvino"):
        ModelStore().pull("maker/relative")
    assert hub.large_downloads() == []
    monkeypatch.setattr("worker_node.models.pull._HEADER", head := 1 << 15)
    files = {"good": make_gguf("m.gguf"), "bad": make_gguf("m.gguf", extra={"rope_freqs.weight": (8,)})}
    hub.repositories |= {f"maker/{name}": Repository({"m.gguf": file.read_bytes()}) for name, file in files.items()}
    with pytest.raises(SourceRejected, match=r"^m\.gguf scales its rotary frequencies"):
        ModelStore().pull("maker/bad")
    assert hub.large_downloads() == [("m.gguf", f"bytes=0-{head - 1}")]
    hub.asked.clear()
    assert ModelStore().pull("maker/good").kind == ModelKind.GENERATION
    rest = f"bytes={head}-{files['good'].stat().st_size - 1}"
    assert hub.large_downloads() == [("m.gguf", f"bytes=0-{head - 1}"), ("m.gguf", rest)], "continued after its header"


def test_a_header_that_is_longer_than_expected_is_judged_by_the_conversion(hub, store_root, make_gguf, monkeypatch):
    monkeypatch.setattr("worker_node.models.pull._HEADER", 100)
    files = {"m.gguf": make_gguf("m.gguf", extra={"rope_freqs.weight": (8,)}).read_bytes()}
    hub.repositories["maker/long"] = Repository(files)
    with pytest.raises((ConversionFailed, SourceRejected), match="scales its rotary frequencies"):
        ModelStore().pull("maker/long")


def test_local_files_are_copied_found_by_their_path_and_pulled_again_under_another_name(store_root, make_bert):
    directory, _ = make_bert("mine")
    store = ModelStore()
    first = store.pull(str(directory))
    assert first.id == "mine"
    assert (directory / "model.safetensors").is_file()
    assert not (first.path / "openvino_model.bin").is_symlink()
    other = store.pull(store.pull_spec(str(directory), model_id="a"))
    assert (store.pull(str(directory)), store.get(str(directory))) == (first, first), "the one that is called as it is"
    store.remove(first.id)
    assert store.get(str(directory)) == other
    with pytest.raises(ConversionFailed, match=r"choose another name with --name"):
        store.pull(store.pull_spec(str(directory), model_id="a", quantization=Quantization.INT8_SYM))


def test_a_source_that_has_changed_since_it_was_pulled_is_not_called_ready(store_root, make_bert):
    directory, _ = make_bert()
    store = ModelStore()
    first = store.pull(str(directory))
    with (directory / "model.safetensors").open("r+b") as weights:
        weights.seek(-4, os.SEEK_END)
        weights.write(b"\0\0\0\0")
    if os.name != "nt":  # there nothing shows it
        # As `cp -p` and `rsync -a` leave a file.
        os.utime(directory / "model.safetensors", (0, 0))
    with pytest.raises(ConversionFailed, match=f"has changed since {first.id} was made"):
        store.pull(str(directory))
    again = store.pull(store.pull_spec(str(directory), model_id="again"))
    assert again.source_sha256["model.safetensors"] != first.source_sha256["model.safetensors"]
    (directory / "model.safetensors").touch()
    assert store.pull(store.pull_spec(str(directory), model_id="again")) == again, "touched, and the same"


def test_what_does_not_fit_into_memory_is_rejected_before_the_conversion(store_root, make_gguf, monkeypatch):
    memory = MachineMemory(8_000_000_000, 900_000_000)
    monkeypatch.setattr("worker_node.models.pull.machine_memory", lambda: memory)
    with pytest.raises(ConversionFailed, match=r"not enough memory to convert .* takes up to 1\.0 GB, 0\.9 GB"):
        ModelStore().pull(str(make_gguf()))


def test_downloads_that_nobody_continues_are_removed_after_a_week(store_root):
    old, new = store_root / ".downloads/old", store_root / ".downloads/new"
    for room in (old, new):
        room.mkdir(parents=True)
        (room / "x.part").write_bytes(b"x")
    for path in (old, old / "x.part"):
        os.utime(path, (0, 0))
    sweep(store_root)
    assert (old.exists(), new.is_dir()) == (False, True)


def test_a_whisper_model_of_a_hub_is_taken_in_openvino_form_and_in_no_other(hub, store_root):
    hub.repositories["maker/Whisper-ov"] = Repository(WHISPER | {"README.md": b"read"})
    model = ModelStore().pull("maker/Whisper-ov")
    assert (model.kind, model.family) == ("transcription", "whisper")
    assert set(model.files) == set(WHISPER)
    files = {"config.json": WHISPER["config.json"], "model.safetensors": b"x", "modules.json": b"[]"}
    hub.repositories["maker/Speech"] = Repository(files)
    with pytest.raises(SourceRejected, match=r"not a whole model .*; .* npu-node pull OpenVINO/whisper-small-fp16-ov"):
        ModelStore().pull("maker/Speech")


@pytest.mark.linux
def test_a_directory_with_a_pipe_is_refused_and_not_waited_for(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    os.mkfifo(source / "config.json")
    with pytest.raises(SourceRejected, match="is a pipe, a socket"):
        ModelStore(tmp_path / "store").pull(str(source))
    with pytest.raises(ConfigurationError, match="is a pipe, a socket"):
        open_directory(source, "piped", tmp_path / "prepared")
