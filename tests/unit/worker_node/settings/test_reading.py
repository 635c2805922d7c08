"""All settings are read and validated as a whole, and every problem names its file and key."""

import json
import re
import sys

import pytest

from worker_node.settings import InvalidSettings, NodeSettings, SettingsSource, parse_settings


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


def test_every_problem_is_reported_with_its_path():
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
        "node.toml: port: Input should be less than or equal to 65535",
        "node.toml: models[0].max_prompt_len: Input should be greater than 0",
        "node.toml: models[1].name: Field required",
        "node.toml: models[1].placements[1].device: Input should be 'NPU', 'GPU' or 'CPU'",
        "node.toml: models[2].placements[0].load: Input should be 'eager' or 'lazy'",
    ]


MODEL = '[[models]]\nname = "a"\n'
TWO_BRACKETS = "must be a list of tables: write [[{0}]], with two brackets"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("prot = 1", "prot: unknown key; did you mean port?"),
        ("request_timeout_s = inf", "request_timeout_s: Input should be a finite number"),
        ('host = ""', "host: must be an address such as 127.0.0.1, or 0.0.0.0 for all; it is empty"),
        ("idle_unload_s = 1", "idle_unload_s: unknown key; it is one of a model: write it in [[models]]"),
        (f"{MODEL}max_promt_len = 1", "models[0].max_promt_len: unknown key; did you mean max_prompt_len?"),
        (f"{MODEL}xyzzy = 1", "models[0].xyzzy: unknown key; docs/settings.md has them all"),
        (
            f"{MODEL}memory_budget = 1",
            "models[0].memory_budget: unknown key; it is one of the node: write it above the first [[models]]",
        ),
        (
            f'{MODEL}aliases = ["smollm2-135m-instruct"]',
            "models[0].aliases: smollm2-135m-instruct is the catalog's name of smollm2-135m-instruct; "
            "choose another alias",
        ),
        ("models = 3", f"models: {TWO_BRACKETS.format('models')}"),
        (
            f'{MODEL}[models.placements]\ndevice = "CPU"',
            f"models[0].placements: {TWO_BRACKETS.format('models.placements')}",
        ),
        (
            f'{MODEL}[[models]]\nname = "A:latest"',
            "models[1].name: A:latest is a name of models[0] (a) already; remove it from one of them",
        ),
        (
            f'{MODEL}aliases = ["smollm2-135m-instruct"]\n[[models]]\nname = "smollm2"',
            "models[0].aliases: smollm2-135m-instruct is a name of models[1] (smollm2) already; remove it "
            "from one of them",
        ),
    ],
)
def test_a_wrong_key_is_named_with_what_was_meant(text, problem):
    assert problems(text) == [f"node.toml: {problem}"]


@pytest.mark.parametrize(
    ("given", "size"),
    [("2048", 2048), ('"2048"', 2048), ('"2GB"', 2_000_000_000), ('"1.5 gib"', 1_610_612_736), ('"512 Mi"', 512 << 20)],
)
def test_a_size_may_have_a_unit(monkeypatch, given, size):
    assert parse_settings(f"memory_budget = {given}").memory_budget == size
    monkeypatch.setenv("NPU_NODE_MAX_BODY_BYTES", given.strip('"'))
    assert parse_settings("").max_body_bytes == size


@pytest.mark.parametrize("given", ["2 bananas", "GB", "-5", "", "1 GB 2", "2 iB", "9" * 400, "２GB"])
def test_a_size_that_is_not_understood_is_refused_with_what_it_must_be(given):
    assert "not 'True'" in problems("memory_budget = true")[0]
    assert problems('memory_budget = "0"') == ["node.toml: memory_budget: Input should be greater than 0"]
    (told,) = problems(f'memory_budget = "{given}"')
    assert told == (
        f'node.toml: memory_budget: must be a size such as "2 GB", "512 MiB" or 1048576 (bytes), not {given[:40]!r}'
    )


@pytest.mark.parametrize(
    ("text", "line"),
    [("port = 1\nhost = ", "at end of document"), ("a = 1\nb = 2\na = 3\n", "at line 3"), ("[[models]\n", "at line 1")],
)
def test_a_file_that_is_not_toml_is_refused_with_the_line(text, line):
    with pytest.raises(InvalidSettings) as caught:
        parse_settings(text, "node.toml")
    (problem,) = map(str, caught.value.problems)
    assert problem.startswith("node.toml: not valid TOML: ")
    assert line in problem


def test_a_file_that_cannot_be_read_is_refused_with_the_reason(tmp_path):
    (tmp_path / "huge").write_text("#" * 1_000_001)
    large = "it is larger than 1 MB"
    reasons = {"gone": "No such file or directory", "huge": large}
    if sys.platform != "win32":
        reasons |= {"": "Is a directory", "/dev/zero": large}
    for config, reason in ((tmp_path / name, reason) for name, reason in reasons.items()):
        with pytest.raises(InvalidSettings, match=f"{re.escape(str(config))}: cannot be read: {reason}"):
            SettingsSource(config).read()
    (tmp_path / "node.toml").write_bytes(b"host = '\xff'")
    with pytest.raises(InvalidSettings, match="is not UTF-8"):
        SettingsSource(tmp_path / "node.toml").read()


def test_a_problem_of_the_environment_or_a_flag_names_its_source(monkeypatch):
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
    ("variable", "hint"),
    [
        ("NPU_NODE_PROT", "did you mean NPU_NODE_PORT?"),
        ("NPU_NODE_EMULATION", "did you mean NPU_NODE_NPU_EMULATION?"),
        # Windows has all names in capitals.
        pytest.param("npu_node_api_keys_fil", "did you mean NPU_NODE_API_KEYS_FILE?", marks=pytest.mark.linux),
        ("NPU_NODE_XYZZY", "remove it"),
    ],
)
def test_a_misspelt_variable_is_answered_with_the_nearest_name(monkeypatch, variable, hint):
    monkeypatch.setenv(variable, "1")
    assert problems("") == [f"{variable}: unknown variable; {hint}"]


def test_variables_of_the_commands_and_of_kubernetes_services_are_ignored(monkeypatch):
    for name in ("URL", "API_KEY", "SERVICE_HOST", "SERVICE_PORT", "PORT_8081_TCP", "PORT_8081_TCP_ADDR"):
        monkeypatch.setenv(f"NPU_NODE_{name}", "1")
    parse_settings("")


def test_no_value_is_ever_shown(monkeypatch):
    monkeypatch.setenv("NPU_NODE_API_KEY_FILES", "s3cret-path")
    monkeypatch.setenv("NPU_NODE_MAX_TEXTS", "s3cret")
    assert "s3cret" not in "".join(problems('api_keys = 3\nhost = ["s3cret"]\ntracing = "s3cret"'))


def test_keys_of_a_file_add_to_those_given_otherwise(tmp_path):
    path = tmp_path / "api_keys"
    path.write_text("# team a\nalpha-0123456789\n\n  beta-0123456789a  \n", encoding="utf-8")
    for given in ("gamma-0123456789,delta-0123456789", ("gamma-0123456789", "delta-0123456789")):
        # With a key the node may listen where others reach it.
        flags = {"api_keys_file": path, "api_keys": given, "host": "0.0.0.0"}  # noqa: S104
        keys = [key.get_secret_value() for key in parse_settings("", flags=flags).api_keys]
        assert keys == ["gamma-0123456789", "delta-0123456789", "alpha-0123456789", "beta-0123456789a"]


def test_an_address_that_others_reach_needs_a_key():
    (problem,) = problems("", host="0.0.0.0")  # noqa: S104
    assert problem.startswith("--host: host: binding 0.0.0.0 would serve anyone")


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "cannot be read: No such file"), (b"\n# none yet\n", "holds no key"), (b"s3cret\xff\n", "not UTF-8")],
)
def test_a_file_without_a_key_stops_the_node_and_shows_nothing_of_it(tmp_path, content, reason):
    path = tmp_path / "api_keys"
    if content is not None:
        path.write_bytes(content)
    (problem,) = problems("", api_keys_file=path)
    assert reason in problem
    assert "s3cret" not in problem


@pytest.mark.parametrize("name", ["cors_origins", "api_keys"])
@pytest.mark.parametrize("text", ["https://a.example,https://b.example", '["https://a.example", "https://b.example"]'])
def test_a_list_in_the_environment_has_commas_or_is_json(monkeypatch, name, text):
    monkeypatch.setenv(f"NPU_NODE_{name.upper()}", text)
    assert len(getattr(parse_settings(""), name)) == 2


@pytest.mark.parametrize("key", ["", " " * 16, "0123456789abcde", "0123456789 abcdef", "0123456789abcde…"])
def test_a_key_that_can_be_guessed_or_not_be_sent_is_refused(key):
    for keys in ([key], ["key-0123456789abcdef", key]):
        (problem,) = problems(f"api_keys = {json.dumps(keys)}")
        assert problem.startswith(
            f"node.toml: api_keys: API key {len(keys)} must have at least 16 characters, printable"
        )
        assert problem.endswith("make one with: python3 -c 'import secrets; print(secrets.token_urlsafe(32))'")
        assert key.strip() == "" or len(key) < 2 or key not in problem
