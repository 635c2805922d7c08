"""The reference of settings is what the declarations say, and what it shows can be written into a file."""

import importlib.util
import re
from pathlib import Path

from worker_node.engines.options import declarations, options_of
from worker_node.settings import ModelSettings, NodeSettings, PlacementSettings, parse_settings

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("settings_reference", ROOT / "docs" / "settings_reference.py")
REFERENCE = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(REFERENCE)
SHIPPED = (ROOT / REFERENCE.SHIPPED_FILE).read_text(encoding="utf-8")
# A commented setting with its default, at the begin of a line.
SETTING = re.compile(r"^# (\w+) = ([^…\s].*?)  +# ", re.MULTILINE)


def test_the_reference_is_current():
    outdated = [
        str(path) for path, text in REFERENCE.update_all(ROOT).items() if path.read_text(encoding="utf-8") != text
    ]
    assert not outdated, f"run `make docs`: {outdated}"


def test_every_setting_says_what_it_does():
    for _, entries in REFERENCE.sections():
        assert all(entry.text for entry in entries), [entry.key for entry in entries if not entry.text]


def test_every_key_is_documented():
    document = (ROOT / REFERENCE.DOCUMENT).read_text(encoding="utf-8")
    keys = NodeSettings.model_fields.keys() - {"models"} | ModelSettings.model_fields.keys() - {"options"}
    keys |= PlacementSettings.model_fields.keys() | {name for owner in declarations() for name in options_of(owner)}
    assert {key for key in keys if f"| `{key}` |" not in document} == set()


def test_the_defaults_of_the_shipped_file_can_be_uncommented(monkeypatch):
    # The suite sets it for the nodes that it starts, and the environment counts more than a file.
    monkeypatch.delenv("NPU_NODE_ENGINE_NICE", raising=False)
    node, _, models = SHIPPED.partition("[[models]]")
    defaults = NodeSettings.model_construct()
    for key, value in SETTING.findall(node):
        assert getattr(parse_settings(f"{key} = {value}"), key) == getattr(defaults, key)
    settings = SETTING.findall(models)
    assert len(settings) > 5
    text = "\n".join(["[[models]]", 'name = "m"', *(f"{key} = {value}" for key, value in settings)])
    model = parse_settings(text).models[0]
    for owner in declarations():
        for name, declared in options_of(owner).items():
            assert model.options.get(name, declared.default) == declared.default
