"""`npu-node pull` and `list --all`: what they print, where, and how they end."""

import json
from dataclasses import replace

import pytest

from tests.support.published import install
from worker_node.cli.main import main
from worker_node.cli.output import TOY_NOTE
from worker_node.models.catalog import Catalog
from worker_node.models.store import ModelStore


def test_models_as_json(in_process, store_root, make_bert, capsys):
    install(ModelStore(), make_bert()[0], "mine")
    assert main(["list", "--all", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(rows) == {entry.id for entry in Catalog.load().entries} | {"mine"}
    assert rows["mine"]["size"] > 0
    assert (rows["mine"]["state"], rows["mine"]["kind"], rows["mine"]["context"]) == ("installed", "embedding", 48)
    assert "all-minilm" in rows["all-minilm-l6-v2"]["aliases"]
    assert rows["all-minilm-l6-v2"]["licence"] == "Apache-2.0"
    assert all(row["download"] or row["estimated_download"] for name, row in rows.items() if name != "mine")


def test_a_damaged_model_is_shown_and_does_not_hide_the_others(in_process, store_root, make_bert, capsys):
    model = install(ModelStore(), make_bert()[0], "mine")
    (model.path / "npu-node.json").write_text("{")
    assert main(["list", "--all"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.split("\n\n")[0].splitlines()[:-1])) <= 100
    columns = {row[0]: row[-2] for line in out.splitlines()[1:] if len(row := line.split()) > 3}
    expected = {"qwen3-1.7b": "no", "phi-3.5-mini-instruct-npu": "yes", "bge-small-en-v1.5": "yes"}
    assert {name: columns[name] for name in expected} == expected
    for told in ("This machine has ", "damaged", "npu-node.json", "smollm2-135m-instruct"):
        assert told in out


def test_pull_of_local_files_installs_and_says_where(in_process, store_root, make_bert, capsys):
    assert main(["pull", str(make_bert()[0]), "--name", "mine"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("mine: ready")
    assert str(store_root / "mine") in captured.out
    assert "building the encoder" in captured.err


@pytest.mark.parametrize("command", [["pull", "gpt-5"], ["pull", "/nowhere/at-all"]])
def test_a_failure_is_one_line_on_stderr_and_status_1(store_root, capsys, command):
    assert main(command) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-1].startswith("npu-node: ")


def test_pull_takes_the_embedded_models_first_and_each_name_once(
    in_process, monkeypatch, store_root, make_bert, capsys
):
    model = install(ModelStore(), make_bert()[0], "mine")
    pulled = []

    def record(self, spec, progress):
        pulled.append(spec)
        return model

    monkeypatch.setattr(ModelStore, "pull", record)
    assert main(["pull", "--embedded", "bge-small", "smollm2-135m-instruct"]) == 0
    assert [spec.model_id for spec in pulled] == ["smollm2-135m-instruct", "all-minilm-l6-v2", "bge-small-en-v1.5"]
    out = capsys.readouterr().out
    assert out.count("ready") == 3
    assert out.endswith(f"{TOY_NOTE}\n")


@pytest.mark.parametrize(("kind", "said"), [("generation", "npu-node run mine"), ("embedding", None)])
def test_pull_says_that_requests_must_name_another_chat_model(
    in_process, monkeypatch, store_root, make_bert, capsys, kind, said
):
    model = replace(install(ModelStore(), make_bert()[0], "mine"), kind=kind)
    monkeypatch.setattr(ModelStore, "pull", lambda *_: model)
    assert main(["pull", "bge-small", "--model-store", str(store_root)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert ("must name it" in last and last.endswith(said)) if said else "ready" in last
