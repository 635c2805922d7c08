"""All settings are read and validated as a whole, and every problem names its file, line and key."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker_node.settings import InvalidSettings, NodeSettings, SettingsSource, parse_settings
from worker_node.settings.toml_lines import line_of

SHIPPED = Path(__file__).parents[4] / "config" / "node.toml"


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for field in NodeSettings.model_fields:
        monkeypatch.delenv(f"NPU_NODE_{field.upper()}", raising=False)


def problems(text, **flags):
    with pytest.raises(InvalidSettings) as caught:
        parse_settings(text, "node.toml", flags)
    return [str(problem) for problem in caught.value.problems]


def test_flags_go_before_the_environment_and_the_environment_before_the_file(monkeypatch):
    text = 'host = "127.0.0.2"\nport = 1\nmax_texts = 1\n'
    monkeypatch.setenv("NPU_NODE_PORT", "2")
    monkeypatch.setenv("npu_node_max_texts", "2")
    settings = parse_settings(text, "node.toml", {"max_texts": 3})
    assert (settings.host, settings.port, settings.max_texts) == ("127.0.0.2", 2, 3)


def test_the_same_text_gives_equal_settings_and_each_table_its_own_model():
    text = '[[models]]\nname = "a"\n[[models]]\nname = "b"\nidle_unload_s = 5\n'
    first, second = parse_settings(text), parse_settings(text.replace("5", "6"))
    assert first == parse_settings("# another comment\n" + text)
    assert first.models[0] == second.models[0]
    assert first.models[1] != second.models[1]


def test_the_shipped_file_is_valid():
    assert [model.name for model in SettingsSource(SHIPPED).read().models] == [
        "all-minilm-l6-v2",
        "smollm2-135m-instruct",
    ]


def test_every_problem_is_told_with_its_line():
    text = """\
# a node
port = 70000

[[models]]
name = "a"
max_prompt_len = 0   # tokens

[[models]]
placements = [
    "NPU",
    "TPU",
]
[[models]]
name = "c"
placements = [{ device = "NPU", load = "soon" }]
"""
    assert problems(text) == [
        "node.toml:2: port: Input should be less than or equal to 65535",
        "node.toml:6: models[0].max_prompt_len: Input should be greater than 0",
        "node.toml:8: models[1].name: Field required",
        "node.toml:9: models[1].placements[1].device: Input should be 'NPU', 'GPU' or 'CPU'",
        "node.toml:15: models[2].placements[0].load: Input should be 'eager' or 'lazy'",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("prot = 1", "node.toml:1: prot: unknown key; did you mean port?"),
        ("rest_port = 1", "node.toml:1: rest_port: unknown key; here that is port"),
        (
            '[[models]]\nname = "a"\n\nmax_promt_len = 1',
            "node.toml:4: models[0].max_promt_len: unknown key; did you mean max_prompt_len?",
        ),
        (
            '[[models]]\nname = "a"\nmodel_path = "/m"',
            "node.toml:3: models[0].model_path: unknown key; here that is path",
        ),
        (
            '[[models]]\nname = "a"\nplacements = [{ device = "CPU", plugin_conf = {} }]',
            "node.toml:3: models[0].placements[0].plugin_conf: unknown key; did you mean plugin_config?",
        ),
        ("models = 3", "node.toml:1: models: should be a list"),
        (
            'port = 1\n[models]\nname = "a"',
            "node.toml:2: models: is a list of tables: write [[models]], with two brackets, instead of [models]",
        ),
        (
            '[[models]]\nname = "a"\n[models.placements]\ndevice = "CPU"',
            "node.toml:3: models[0].placements: is a list of tables: write [[models.placements]], with two brackets, "
            "instead of [models.placements]",
        ),
        (
            '[[models]]\nname = "a"\n[[models]]\nname = "A:latest"',
            "node.toml:4: models[1].name: A:latest is a name of models[0] (a) already; remove it from one of them",
        ),
        (
            '[[models]]\nname = "a"\naliases = ["b"]\n[[models]]\nname = "b"',
            "node.toml:3: models[0].aliases: b is a name of models[1] (b) already; remove it from one of them",
        ),
        (
            '[[models]]\nname = "a"\n[[models]]\nname = "b"\naliases = ["x", "A:latest"]',
            "node.toml:5: models[1].aliases: A:latest is a name of models[0] (a) already; remove it from one of them",
        ),
        (
            '[[models]]\nname = "a"\naliases = ["x"]\n[[models]]\nname = "b"\naliases = ["X"]',
            "node.toml:6: models[1].aliases: X is a name of models[0] (a) already; remove it from one of them",
        ),
        (
            '[[models]]\nname = "a"\naliases = ["smollm2-135m-instruct"]\n[[models]]\nname = "smollm2"',
            "node.toml:3: models[0].aliases: smollm2-135m-instruct is a name of models[1] (smollm2) already; remove it "
            "from one of them",
        ),
    ],
)
def test_a_wrong_key_is_named_with_what_was_meant(text, problem):
    assert problems(text) == [problem]


def test_a_key_that_resembles_nothing_lists_the_known_ones():
    (problem,) = problems('[[models]]\nname = "a"\nxyzzy = 1')
    assert problem.startswith("node.toml:3: models[0].xyzzy: unknown key; known are aliases, ")


@pytest.mark.parametrize(
    ("text", "line"),
    [("port = 1\nhost = ", 2), ("a = 1\nb = 2\na = 3\n", 3), ('x = """\n\n', 2), ("[[models]\n", 1), ("x = [", 1)],
)
def test_a_file_that_is_no_toml_is_told_with_its_line(text, line):
    with pytest.raises(InvalidSettings) as caught:
        parse_settings(text, "node.toml")
    (problem,) = caught.value.problems
    assert (problem.source, problem.line) == ("node.toml", line)
    assert "not valid TOML" in problem.message


def test_toml_nested_beyond_reason_is_told():
    (problem,) = problems("x = " + "[" * 100_000)
    assert problem == "node.toml: not valid TOML: nested too deeply"


def test_a_file_that_cannot_be_read_is_told(tmp_path):
    for config, reason in ((tmp_path / "gone", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(InvalidSettings, match=f"{config}: cannot be read: {reason}"):
            SettingsSource(config).read()
    (tmp_path / "node.toml").write_bytes(b"host = '\xff'")
    with pytest.raises(InvalidSettings, match="is not UTF-8"):
        SettingsSource(tmp_path / "node.toml").read()


def test_a_problem_of_the_environment_or_a_flag_names_that_and_no_line(monkeypatch):
    text = "port = 1\nmax_texts = 1\n"
    monkeypatch.setenv("NPU_NODE_MAX_TEXTS", "many")
    told = problems(text, port=-1)
    assert told[0].startswith("--port: port: Input should be greater")
    assert told[1].startswith("NPU_NODE_MAX_TEXTS: max_texts: Input should be a valid integer")


def test_models_in_the_environment_are_json(monkeypatch):
    monkeypatch.setenv("NPU_NODE_MODELS", '[{"name": "a"}]')
    assert [model.name for model in parse_settings("").models] == ["a"]
    monkeypatch.setenv("NPU_NODE_MODELS", "a,b")
    assert problems("") == ["NPU_NODE_MODELS: is not valid JSON"]
    monkeypatch.setenv("NPU_NODE_MODELS", '[{"nam": "a"}]')
    assert problems("") == [
        "NPU_NODE_MODELS: models[0].name: Field required",
        "NPU_NODE_MODELS: models[0].nam: unknown key; did you mean name?",
    ]


@pytest.mark.parametrize(
    ("variable", "problem"),
    [
        ("NPU_NODE_PROT", "NPU_NODE_PROT: unknown variable; did you mean NPU_NODE_PORT?"),
        ("NPU_NODE_EMULATION", "NPU_NODE_EMULATION: unknown variable; did you mean NPU_NODE_NPU_EMULATION?"),
        ("npu_node_api_keys_fil", "npu_node_api_keys_fil: unknown variable; did you mean NPU_NODE_API_KEYS_FILE?"),
        ("NPU_NODE_REST_PORT", "NPU_NODE_REST_PORT: unknown variable; here that is port"),
        ("NPU_NODE_XYZZY", "NPU_NODE_XYZZY: unknown variable; remove it"),
    ],
)
def test_a_misspelt_variable_is_told_with_the_nearest_name(monkeypatch, variable, problem):
    monkeypatch.setenv(variable, "1")
    assert problems("") == [problem]


def test_variables_of_the_commands_and_of_kubernetes_services_are_nobodys_mistake(monkeypatch):
    for name in ("URL", "API_KEY", "SERVICE_HOST", "SERVICE_PORT", "PORT_8081_TCP", "PORT_8081_TCP_ADDR"):
        monkeypatch.setenv(f"NPU_NODE_{name}", "1")
    parse_settings("")


def test_no_value_is_ever_shown(monkeypatch):
    monkeypatch.setenv("NPU_NODE_API_KEY_FILES", "s3cret-path")
    assert "s3cret" not in "".join(problems('api_keys = 3\nhost = ["s3cret"]\ntracing = "s3cret"'))


# Statements, each with the path that it sets; some take several lines or stand below a comment.
STATEMENTS = st.lists(
    st.sampled_from(
        [
            "{name} = 1",
            '{name} = """\n[x]\ny = 1\n"""',
            "{name} = [\n  1, # one\n\n  2,\n]",
            "# {name} = 2\n\n{name} = {{ a = [1, 2] }}",
            "{name}.b.c = true",
            '"{name}" = "# no comment"',
        ]
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=30)
@given(STATEMENTS, st.booleans())
def test_the_line_is_where_the_statement_begins(statements, in_table):
    head = "[[models]]\n[[models]]\n" if in_table else ""
    prefix = ("models", 1) if in_table else ()
    text, begins = head, {}
    for number, statement in enumerate(statements):
        written = statement.format(name=f"key{number}")
        comments = 2 if written.startswith("#") else 0
        begins[f"key{number}"] = text.count("\n") + 1 + comments
        text += written + "\n"
    tomllib.loads(text)
    for name, line in begins.items():
        assert line_of(text, (*prefix, name)) == line
