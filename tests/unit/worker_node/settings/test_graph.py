"""`graph.pbtxt` of an OpenVINO Model Server installation is read when its directory is pulled."""

import pytest

from worker_node.cli.main import main
from worker_node.core.errors import ConfigurationError
from worker_node.settings import parse_settings
from worker_node.settings.graph import read_graph

GRAPH = """# Written by hand
input_stream: "HTTP_REQUEST_PAYLOAD:input"
node: {
  calculator: "HttpLLMCalculator"
  input_stream_info: { tag_index: 'LOOPBACK:0', back_edge: true }
  node_options: {
      [type.googleapis.com / mediapipe.LLMCalculatorOptions]: {
          models_path: "./",
          OPTIONS
      }
  }
  input_stream_handler { options < [mediapipe.SyncSetInputStreamHandlerOptions.ext] { sync_set { tag: -1.5 } } > }
}
"""


@pytest.fixture
def directory(tmp_path):
    def make(options, graph=GRAPH):
        (tmp_path / "graph.pbtxt").write_text(graph.replace("OPTIONS", options), encoding="utf-8")
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ("", {}),
        (
            "max_num_seqs: 8 cache_size: 2, best_of_limit: 5;",
            {"max_num_seqs": 8, "cache_size_gb": 2, "best_of_limit": 5},
        ),
        ("enable_prefix_caching: false", {"enable_prefix_caching": False}),
        ("max_tokens_limit: 9 max_num_batched_tokens: 64", {"max_tokens_limit": 9, "max_num_batched_tokens": 64}),
        ('device: "GPU"', {"placements": ["GPU"]}),
        ('target_device: "CPU"', {"placements": ["CPU"]}),
        ("enable_word_timestamps: true", {"word_timestamps": True}),
        ("pooling: CLS normalize_embeddings: true", {"pooling": "cls", "normalize": True}),
        (r'plugin_config: "{\"A\": 4}"', {"placements": [{"device": "CPU", "plugin_config": {"A": 4}}]}),
        (
            """device: "NPU" plugin_config: '{"MAX_PROMPT_LEN": 2048, "OTHER": "YES"}'""",
            {"max_prompt_len": 2048, "placements": [{"device": "NPU", "plugin_config": {"OTHER": "YES"}}]},
        ),
    ],
)
def test_options_become_settings(directory, options, settings):
    assert read_graph(directory(options)) == (settings, [])


@pytest.mark.parametrize(
    ("options", "ignored"),
    [
        ("dynamic_split_fuse: true truncate: true", ["dynamic_split_fuse", "truncate"]),
        ('device: "AUTO" plugin_config: "{\\"A\\": 1}"', ["device AUTO", "plugin_config"]),
        ('tool_parser: "hermes3" cache_eviction_config { start_size: 32 }', ["tool_parser", "cache_eviction_config"]),
    ],
)
def test_other_options_are_named(directory, options, ignored):
    assert read_graph(directory(options)) == ({}, ignored)


@pytest.mark.parametrize(
    ("graph", "why"),
    [
        ("node {", "a message has no end"),
        ("node: }", "a message ends that did not begin"),
        ("a { " * 9_000, "a message has no end"),
        ("#" * 70_000, "more than 65536 characters"),
        (r"models_path: '\x'", "escape"),
        ("models_path: '.' plugin_config: '[1]'", "plugin_config must be a JSON object, got [1]"),
        ("models_path: '.' plugin_config: '{'", "cannot be read"),
        (f"models_path: '.' plugin_config: '{'[' * 60_000}'", "cannot be read"),
    ],
)
def test_a_damaged_graph_is_refused_with_its_place(directory, graph, why):
    with pytest.raises(ConfigurationError) as caught:
        read_graph(directory("", graph))
    assert caught.value.message.startswith(f"{directory('', graph) / 'graph.pbtxt'} cannot be read: ")
    assert why in caught.value.message


def test_pulling_a_directory_prints_its_graph_as_settings(directory, capsys, monkeypatch):
    monkeypatch.setattr("worker_node.cli.pull._pull_to_store", lambda *_: 0)
    path = directory("""device: "NPU" plugin_config: '{"A": "é"}' max_num_seqs: 4 tool_parser: "x" """)
    assert main(["pull", str(path), "--name", "mine"]) == 0
    printed = capsys.readouterr().out
    (wanted,) = parse_settings(printed).models
    assert (wanted.name, wanted.options) == ("mine", {"max_num_seqs": 4})
    assert wanted.placements[0].plugin_config == {"A": "é"}
    assert printed.endswith("\n# without a counterpart here: tool_parser\n")
    (path / "1").mkdir()
    directory("", GRAPH.replace('"./"', '"./1"'))
    assert main(["pull", str(path)]) != 0
    assert f"the model is in {path / '1'}: pull that directory" in capsys.readouterr().err
