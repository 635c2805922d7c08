"""Compiled blobs are kept apart by all that they depend on, and removed when they can never be used again."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_node.devices.compile_cache import KEY_FILE, CacheKey, cache_directory, model_hash, prepare

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
def test_every_part_of_the_key_has_its_own_place(tmp_path, name):
    assert cache_directory(tmp_path, changed(name)) != cache_directory(tmp_path, KEY)


@pytest.mark.parametrize("name", CHANGES)
def test_only_entries_of_other_versions_of_the_same_model_and_device_are_removed(tmp_path, name):
    before = prepare(tmp_path, changed(name), tmp_path)
    (before / "blob").write_bytes(b"x")
    now = prepare(tmp_path, KEY, tmp_path)
    assert now.is_dir()
    assert before.exists() == (name in {"model", "device", "lengths"})


def test_two_stores_with_a_model_of_one_name_keep_each_others_blobs(tmp_path):
    root, mine, theirs = tmp_path / "compiled", tmp_path / "mine", tmp_path / "theirs"
    mine.mkdir()
    theirs.mkdir()
    other = prepare(root, changed("model_hash"), theirs)
    assert prepare(root, KEY, mine).is_dir()
    assert other.is_dir()

    theirs.rmdir()
    prepare(root, KEY, mine)
    assert not other.exists()


def test_an_entry_that_names_no_model_directory_is_removed_when_outdated(tmp_path):
    old = cache_directory(tmp_path, changed("openvino"))
    old.mkdir(parents=True)
    (old / KEY_FILE).write_bytes(msgspec.json.encode(changed("openvino")))
    prepare(tmp_path, KEY, tmp_path)
    assert not old.exists()


def test_what_is_no_entry_is_left_alone(tmp_path):
    stranger = tmp_path / "m" / "notes"
    stranger.mkdir(parents=True)
    (stranger / KEY_FILE).write_text("{")
    (tmp_path / "m" / "file").write_text("")
    prepare(tmp_path, KEY, tmp_path)
    assert stranger.exists()
    assert (tmp_path / "m" / "file").exists()


def test_the_same_key_keeps_its_blobs(tmp_path):
    (prepare(tmp_path, KEY, tmp_path) / "blob").write_bytes(b"x")
    assert (prepare(tmp_path, KEY, tmp_path) / "blob").exists()


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


@given(st.builds(CacheKey, model=st.just("m"), model_hash=st.text(), device=st.just("NPU"), openvino=st.text()))
def test_no_key_outdates_itself_and_outdating_is_mutual(key):
    assert not key.outdates(key)
    assert key.outdates(KEY) == KEY.outdates(key)
