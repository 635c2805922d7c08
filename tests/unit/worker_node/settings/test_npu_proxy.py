"""What npu-proxy's users have in scripts and dashboards, as docs/coming-from.md promises it."""

import re
import shutil
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.parser import text_string_to_metric_families

from worker_node.cli.main import main
from worker_node.http.metrics import NpuProxyCollector, generate_latest
from worker_node.settings import InvalidSettings, NodeSettings, parse_settings
from worker_node.settings.npu_proxy import notices

ROOT = Path(__file__).parents[4]
SECTION = (ROOT / "docs/coming-from.md").read_text(encoding="utf-8").split("## npu-proxy")[1].split("\n## ")[0]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for field in NodeSettings.model_fields:
        monkeypatch.delenv(f"NPU_NODE_{field.upper()}", raising=False)


def embedder(settings):
    return next(model for model in settings.models if model.name != "smollm2-135m-instruct")


def writer(settings):
    return next(model for model in settings.models if model.name == "smollm2-135m-instruct")


# A value, and what it makes of the settings.
EFFECTS = {
    "HOST": ("localhost", lambda settings: settings.host == "localhost"),
    "PORT": ("8099", lambda settings: settings.port == 8099),
    "TOKEN_LIMIT": ("1500", lambda settings: settings.npu_token_limit == 1500),
    "COMPILE_CACHE_DIR": ("/c", lambda settings: settings.compile_cache == Path("/c")),
    "ALLOWED_HOSTS": ("a.example,b.example", lambda settings: settings.allowed_hosts == ("a.example", "b.example")),
    "INFERENCE_TIMEOUT": ("7", lambda settings: settings.request_timeout_s == 7),
    "LOAD_TIMEOUT": ("8", lambda settings: settings.load_timeout_s == 8),
    "EMBEDDING_CACHE_SIZE": ("9", lambda settings: settings.embedding_cache == 9),
    "DEVICE": ("gpu", lambda settings: settings.devices == ("GPU", "CPU")),
    "PREFERRED_DEVICE": ("CPU", lambda settings: settings.devices == ("CPU",)),
    "FALLBACK_DEVICE": ("CPU", lambda settings: settings.devices == ("NPU", "CPU")),
    "EMBEDDING_MODEL": ("BAAI/bge-small-en-v1.5", lambda settings: embedder(settings).name == "BAAI/bge-small-en-v1.5"),
    "EMBEDDING_DEVICE": ("GPU", lambda settings: [place.device for place in embedder(settings).placements] == ["GPU"]),
    "MAX_PROMPT_LEN": ("2048", lambda settings: writer(settings).options == {"max_prompt_len": 2048}),
    "MODEL_PATH": ("/nothing", lambda settings: len(settings.models) == 2),
    "LOG_LEVEL": ("WARNING", lambda settings: settings == NodeSettings()),
}


def documented():
    rows = [line for line in SECTION.splitlines() if line.startswith("| `NPU_PROXY_")]
    first = [row.split("|")[1] for row in rows if "no effect" not in row]
    return {name.removeprefix("NPU_PROXY_").lstrip("_") for cell in first for name in re.findall(r"`(\w+)`", cell)}


def test_every_documented_variable_is_proven_here():
    assert documented() == EFFECTS.keys()


@pytest.mark.parametrize("name", EFFECTS)
def test_a_variable_has_the_effect_that_is_documented(monkeypatch, name):
    value, holds = EFFECTS[name]
    monkeypatch.setenv(f"NPU_PROXY_{name}", value)
    assert holds(parse_settings(""))


@pytest.mark.parametrize(
    ("text", "variables", "flags"), [("port = 1", {}, {}), ("", {"NPU_NODE_PORT": "1"}, {}), ("", {}, {"port": 1})]
)
def test_our_own_words_are_stronger(monkeypatch, text, variables, flags):
    monkeypatch.setenv("NPU_PROXY_PORT", "8099")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert parse_settings(text, flags=flags, npu_proxy=True).port == 1


@pytest.mark.parametrize(("name", "value"), [("PORT", "70000"), ("DEVICE", "TPU"), ("EMBEDDING_DEVICE", "x")])
def test_a_wrong_value_is_laid_to_its_variable_alone(monkeypatch, name, value):
    monkeypatch.setenv(f"NPU_PROXY_{name}", value)
    with pytest.raises(InvalidSettings, match=f"NPU_PROXY_{name}"):
        parse_settings("")
    with pytest.raises(InvalidSettings) as caught:
        parse_settings("port = 70001\ndevices = [1]\nmodels = 1", "node.toml")
    assert "NPU_PROXY" not in str(caught.value)


@pytest.mark.real
def test_models_of_its_directory_are_served_where_they_are(monkeypatch, store, tmp_path):
    for name in ("smollm2-135m-instruct", "all-minilm-l6-v2"):
        shutil.copytree(store.get(name).path, tmp_path / name)
    monkeypatch.setenv("NPU_PROXY_MODEL_PATH", str(tmp_path))
    monkeypatch.setenv("NPU_PROXY_MAX_PROMPT_LEN", "512")
    monkeypatch.setenv("NPU_PROXY_EMBEDDING_MODEL", "sentence-transformers/all-MiniLM-L6-v2")
    monkeypatch.setenv("NPU_PROXY_EMBEDDING_DEVICE", "cpu")
    embeds, writes = parse_settings("").models
    assert (writes.path, writes.options) == (tmp_path / "smollm2-135m-instruct", {"max_prompt_len": 512})
    assert (embeds.path, embeds.options) == (tmp_path / "all-minilm-l6-v2", {})
    assert [place.device for place in embeds.placements] == ["CPU"]


def test_the_profile_has_its_defaults_and_its_variables_change_them(monkeypatch, tmp_path):
    monkeypatch.setenv("NPU_NODE_MODEL_STORE", str(tmp_path))
    settings = parse_settings("", npu_proxy=True)
    assert (settings.port, settings.host, settings.npu_token_limit) == (11435, "127.0.0.1", None)
    assert settings.npu_proxy_names
    assert writer(settings).options == {"max_prompt_len": 1800}
    assert embedder(settings).name == "all-minilm-l6-v2"
    bge = tmp_path / "bge-small-en-v1.5"
    bge.mkdir()
    (bge / "npu-node.json").write_text("{}")
    assert embedder(parse_settings("", npu_proxy=True)).name == "bge-small-en-v1.5"
    monkeypatch.setenv("NPU_PROXY_PORT", "1")
    assert parse_settings("", npu_proxy=True).port == 1


def test_each_variable_gets_one_notice():
    lines = notices({"NPU_PROXY_PORT": "1", "NPU_PROXY_NEW": "x", "NPU_PROXY_HOST": "", "A": "b"})
    assert lines == [
        "NPU_PROXY_NEW is npu-proxy's and has no effect: there is nothing like it here",
        "NPU_PROXY_PORT is npu-proxy's; here it is NPU_NODE_PORT, which counts for more",
    ]


@pytest.mark.parametrize("name", ["NPU_NODE_LOG_LEVEL", "NPU_PROXY_LOG_LEVEL"])
def test_a_wrong_level_of_the_log_is_laid_to_its_variable(monkeypatch, capsys, name):
    monkeypatch.setenv(name, "loud")
    # Options alone are those of `serve`.
    assert main(["--host", "127.0.0.1", "--port", "0"]) == 1
    assert f"{name} must be one of debug, info, warning, error, got 'loud'" in capsys.readouterr().err


def test_its_metrics_add_up_what_it_does_not_tell_apart():
    ours = CollectorRegistry()
    tokens = Counter("npu_node_generation_tokens", "t", ("model", "device"), registry=ours)
    first = Histogram("npu_node_time_to_first_token_seconds", "t", ("model", "device"), buckets=(0.1, 1), registry=ours)
    for device, count in (("NPU", 3), ("CPU", 4)):
        tokens.labels("m", device).inc(count)
        first.labels("m", device).observe(0.5)
    as_proxy = CollectorRegistry()
    as_proxy.register(NpuProxyCollector(ours))
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(generate_latest(as_proxy).decode())
        for sample in family.samples
    }
    model = ("model", "m")
    assert samples["npu_proxy_tokens_generated_total", model] == 7
    assert samples["npu_proxy_time_to_first_token_seconds_count", model] == 2
    assert samples["npu_proxy_time_to_first_token_seconds_bucket", ("le", "0.1"), model] == 0
    assert samples["npu_proxy_time_to_first_token_seconds_bucket", ("le", "1.0"), model] == 2
