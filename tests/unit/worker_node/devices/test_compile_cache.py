"""Compiled blobs are kept apart by all that they depend on, and removed when they can never be used again."""

import msgspec
import pytest

from worker_node.devices.compile_cache import KEY_FILE, CacheKey, model_hash, prepare

KEY = CacheKey(
    model="m", model_hash="aa", device="NPU", openvino="2026.4", driver="1.2", compiler="7", lengths=(1024, 128)
)
CHANGES = {
    "model": "n",
    "model_hash": "bb",
    "device": "GPU",
    "openvino": "2027.1",
    "driver": None,
    "compiler": "8",
    "lengths": (2048, 128),
}


def changed(name):
    return msgspec.structs.replace(KEY, **{name: CHANGES[name]})


@pytest.mark.parametrize("name", CHANGES)
def test_only_entries_of_other_versions_of_the_same_model_and_device_are_removed(tmp_path, name):
    before = prepare(tmp_path, changed(name))
    (before / "blob").write_bytes(b"x")
    now = prepare(tmp_path, KEY)
    assert now.is_dir()
    assert before.exists() == (name in {"model", "model_hash", "device", "lengths"})


def test_what_is_no_entry_is_left_alone(tmp_path):
    stranger = tmp_path / "m" / "notes"
    stranger.mkdir(parents=True)
    (stranger / KEY_FILE).write_text("{")
    (tmp_path / "m" / "file").write_text("")
    prepare(tmp_path, KEY)
    assert stranger.exists()
    assert (tmp_path / "m" / "file").exists()


def test_the_models_hash_follows_its_files(tmp_path):
    def hashed():
        return model_hash(tmp_path, ["a", "b"])

    (tmp_path / "a").write_text("1")
    first = hashed()
    (tmp_path / "b").write_text("2")
    second = hashed()
    (tmp_path / "a").write_text("12")
    (tmp_path / "b").write_text("")
    assert len({first, second, hashed()}) == 3
    (tmp_path / "c").write_text("3")
    assert hashed() == hashed()
