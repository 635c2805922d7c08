"""Compiled blobs are kept apart by all that they depend on, and removed when they can never be used again."""

import re
from pathlib import Path

import msgspec
import pytest

from worker_node.core.environment import native_environment
from worker_node.devices.compile_cache import KEY_FILE, CacheKey, prepare

CONFIG = Path(__file__).parents[4] / "config"
KEY = CacheKey(
    model="m", model_hash="aa", device="NPU", openvino="2026.4", driver="1.2", compiler="7", lengths=(1024, 128)
)


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({"model": "n"}, True),
        ({"model_hash": "bb"}, True),
        ({"device": "GPU", "openvino": "2027.1"}, True),
        ({"lengths": (2048, 128)}, True),
        ({"openvino": "2027.1"}, False),
        ({"driver": None}, False),
        ({"compiler": "8"}, False),
    ],
)
def test_only_entries_of_other_versions_of_the_same_model_and_device_are_removed(tmp_path, change, kept):
    before = prepare(tmp_path, msgspec.structs.replace(KEY, **change))
    (before / "blob").write_bytes(b"x")
    assert prepare(tmp_path, KEY).is_dir()
    assert before.exists() is kept


def test_what_is_no_entry_is_left_alone(tmp_path):
    stranger = tmp_path / "m" / "notes"
    stranger.mkdir(parents=True)
    (stranger / KEY_FILE).write_text("{")
    (tmp_path / "m" / "file").write_text("")
    prepare(tmp_path, KEY)
    assert stranger.exists()
    assert (tmp_path / "m" / "file").exists()


def image_environment():
    """What the image sets, and the directories that a container of it may write."""
    text = (CONFIG / "container" / "Containerfile").read_text(encoding="utf-8").rpartition("\nFROM ")[2]
    volumes = re.findall(r'"(/[^"]+)"', re.findall(r"^VOLUME (.*)$", text, re.MULTILINE)[0])
    return dict(re.findall(r"\b([A-Z_]+)=(\S+)", re.findall(r"^ENV ((?:.*\\\n)*.*)", text, re.MULTILINE)[0])), volumes


def chart_environment():
    text = (CONFIG / "helm" / "npu-node" / "templates" / "_helpers.tpl").read_text(encoding="utf-8")
    return dict(re.findall(r"- name: ([A-Z_]+)\n +value: (/\S+)", text)), ["/models"]


def unit_environment(name):
    text = (CONFIG / "systemd" / name).read_text(encoding="utf-8")
    # %C is /var/cache for the system and ~/.cache for a user.
    if "CacheDirectory" in text:
        given = " ".join(re.findall(r"^Environment=(.*)$", text, re.MULTILINE)).replace("%C", "/var/cache")
        return dict(part.split("=", 1) for part in given.split()), ["/var/cache/npu-node"]
    assert "ReadWritePaths=%C" in text
    return {"HOME": "/home/u"}, ["/home/u/.cache"]


@pytest.mark.parametrize(
    ("given", "writable"),
    [
        unit_environment("npu-node.service"),
        unit_environment("npu-node-bounded.service"),
        image_environment(),
        chart_environment(),
    ],
    ids=["unit", "bounded unit", "image", "chart"],
)
def test_the_drivers_own_cache_is_where_a_service_may_write(given, writable):
    kept = Path(native_environment(given)["ZE_INTEL_NPU_CACHE_DIR"])
    assert any(kept.is_relative_to(directory) for directory in writable), kept


@pytest.mark.parametrize("chosen", ["/elsewhere", ""])
def test_a_drivers_cache_that_the_environment_names_is_kept(chosen):
    """Empty, it is none."""
    given = {"HOME": "/home/u", "ZE_INTEL_NPU_CACHE_DIR": chosen}
    assert native_environment(given)["ZE_INTEL_NPU_CACHE_DIR"] == chosen
