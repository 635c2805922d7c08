"""What docs/coming-from.md says of other servers' names, row by row."""

import re
from pathlib import Path

import pytest

from worker_node.bounded.settings import BoundedSettings
from worker_node.cli.main import build_parser
from worker_node.settings import ModelSettings, NodeSettings, parse_settings
from worker_node.settings.graph import read_graph
from worker_node.settings.model import known_options
from worker_node.tasks.generate.task import ContinuousOptions, GenerationOptions, StatefulOptions

PAGE = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text(encoding="utf-8")
MODEL = "smollm2-135m-instruct"


def rows(heading):
    """The rows of the table with that heading: the code of each cell, and the text of the last."""
    table = PAGE.split(f"\n| {heading} |", 1)[1].split("\n\n", 1)[0]
    cells = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    return [([re.findall(r"`([^`]+)`", cell) for cell in row], row[-1]) for row in cells]


SETTINGS = {*NodeSettings.model_fields, *ModelSettings.model_fields, *known_options(), "[[models]]", "node.toml"}


@pytest.mark.parametrize("row", [row for row, _ in rows("OVMS | here")], ids=str)
async def test_a_flag_of_ovms_has_a_setting_here(row, http, node):
    theirs, ours = row
    if theirs == ["--port", "/v2"]:
        for path in ("/v2/models/m/infer", "/v2/health/ready"):
            async with http.get(node.url + path) as reply:
                assert reply.status == 404
    elif theirs == ["--source_model … --pull"]:
        build_parser().parse_args(ours[0].split()[1:])
    elif theirs == ["--config_path", "model_config_list"]:
        assert {*ours} <= SETTINGS
    else:
        for index, key in enumerate(theirs):
            assert ours[index].split(" = ")[0] in SETTINGS, key


GRAPH = "`graph.pbtxt` | `[[models]]` | default there, here"
VALUES = {
    "device": '"CPU"', "target_device": '"CPU"', "enable_prefix_caching": "false",
    "normalize_embeddings": "true", "pooling": "CLS", "models_path": '"./1"', "PREFILL_HINT": '"STATIC"',
    "GENERATE_HINT": '"BEST_PERF"', "CACHE_DIR": '"/cache"', "NPUW_LLM_PREFILL_CHUNK_SIZE": "512",
    "plugin_config": "'{\"A\": 1}'",
}  # fmt: skip


@pytest.mark.parametrize("row", [row for row, _ in rows(GRAPH)], ids=str)
def test_an_option_of_a_graph_becomes_the_setting(row, tmp_path):
    (tmp_path / "1").mkdir()
    theirs, ours, *_ = row
    for index, key in enumerate(theirs):
        option = f"{key}: {VALUES.get(key, '7')}"
        if key.isupper():
            option = f"device: 'NPU' plugin_config: '{{\"{key}\": {VALUES.get(key, '7')}}}'"
        (tmp_path / "graph.pbtxt").write_text(f"node {{ options {{ models_path: '.' {option} }} }}")
        expected = key if not ours else "placements" if key == "plugin_config" else ours[min(index, len(ours) - 1)]
        if key == "cache_size":
            expected = ours[0]
        found, ignored = read_graph(tmp_path)
        assert (found.keys() >= {expected}, ignored) == (True, [])
        (wanted,) = parse_settings("", flags={"models": [{"name": "m", **found}]}).models
        assert expected in wanted.options or getattr(wanted, expected) is not None


def test_the_defaults_beside_those_of_ovms_are_ours():
    told = {key: text for (keys, *_), text in rows(GRAPH) for key in keys}
    continuous, npu = ContinuousOptions(), StatefulOptions()
    assert told["MAX_PROMPT_LEN"] == f"{npu.max_prompt_len} and {npu.min_response_len} in both"
    assert told["max_num_seqs"] == f"{continuous.max_num_seqs} and {continuous.max_num_batched_tokens} in both"
    assert told["enable_prefix_caching"].endswith("; " + str(continuous.enable_prefix_caching).lower())
    assert told["cache_size"].endswith(f"; {continuous.cache_size_gb}, as needed")
    assert told["best_of_limit"].startswith(f"{GenerationOptions().best_of_limit}, ")


REQUESTS = [
    ("best_of", {"best_of": 3, "n": 2, "temperature": 1.0}, 200),
    ("best_of", {"best_of": 3, "use_beam_search": True, "length_penalty": 2.0}, 400),
    ("stream: true", {"best_of": 3, "stream": True}, 400),
]


async def test_parameters_of_a_request_to_ovms_are_answered_as_the_page_says(http, node):
    assert [row[0] for row, _ in rows("of a request | here")] == [[name] for name, *_ in REQUESTS]
    for _, fields, status in REQUESTS:
        body = {"model": MODEL, "prompt": "One, two,", "max_tokens": 4} | fields
        async with http.post(node.url + "/v3/completions", json=body) as reply:
            answer = await reply.json()
            assert reply.status == status, answer
        if status == 200:
            assert len(answer["choices"]) == 2
        if "use_beam_search" in fields:
            assert "enable_prefix_caching = false" in answer["error"]["message"]


async def test_metrics_like_those_of_ovms_are_by_model(http, node):
    async with http.get(node.url + "/metrics") as reply:
        metrics = await reply.text()
    for (_, ours), _text in rows("metric | here"):
        assert re.search(rf'^{ours[0]}{{device="CPU",model="{MODEL}"}} \d', metrics, re.MULTILINE), ours


@pytest.mark.parametrize("row", [row for row, _ in rows("Ollama | here")], ids=str)
async def test_a_name_of_ollama_has_one_here(row, http, node):
    theirs, ours = row
    if ours == ["npu-node"]:
        for word in theirs:
            with pytest.raises(SystemExit) as caught:
                build_parser().parse_args([word.removeprefix("ollama "), "--help"])
            assert caught.value.code == 0
    elif theirs[0] == "ollama create":
        for word in theirs:
            async with http.post(f"{node.url}/api/{word.removeprefix('ollama ')}", json={}) as reply:
                assert reply.status == 501
    else:
        assert ours[0].removeprefix("NPU_NODE_").lower() in SETTINGS
        for key in {"keep_alive", "num_ctx"} & set(theirs):
            body = {"model": MODEL, "prompt": "One", "stream": False, "options": {"num_predict": 1}}
            body |= {"keep_alive": "5m"} if key == "keep_alive" else {"options": {"num_predict": 1, "num_ctx": 512}}
            async with http.post(node.url + "/api/generate", json=body) as reply:
                assert reply.status == 200


WORKER = "variables of a worker that runs one model on the NPU with GenAI | here"


@pytest.mark.parametrize("row", [row for row, _ in rows(WORKER)], ids=str)
def test_what_a_worker_of_ones_own_has_is_there(row, monkeypatch, tmp_path, capsys):
    theirs, commands = row
    for name in (name for name in theirs if not name.endswith("*")):
        monkeypatch.setenv(name, str(tmp_path))
        assert str(getattr(BoundedSettings(), name.removeprefix("OV_GENAI_NPU_").lower())) == str(tmp_path)
    for command in commands:
        _, word, *options = command.split()
        with pytest.raises(SystemExit):
            build_parser().parse_args([word, "--help"])
        assert f"usage: npu-node {word}" in (text := capsys.readouterr().out)
        assert all(option in text for option in options)
