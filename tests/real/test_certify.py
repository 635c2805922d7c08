"""npu-node certify with real engines: what a passport covers, and for how long; test_certify_faults has what fails."""

import gzip
import json

import httpx
import pytest

from tests.real.certifying import AGREEMENT, EMBEDDER, WRITER, emulated_settings, only, passport_of, run
from tests.support.nodes import start_node
from worker_node.certify.checks import QUICK
from worker_node.cli.main import main
from worker_node.models.passports import Passport, PassportStore

pytestmark = [pytest.mark.real, pytest.mark.timeout(900), pytest.mark.usefixtures("store")]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    return emulated_settings(tmp_path_factory.mktemp("certify"))


@pytest.fixture(scope="module")
def certified(emulated):
    """The first passport of the embedder on the emulated NPU, of a node that requires one."""
    words = ["certify", EMBEDDER, "--config", emulated, "--quick", "--out", emulated.parent]
    run(*words, quick=QUICK, NPU_NODE_REQUIRE_CERTIFIED="true")
    return passport_of(emulated.parent, EMBEDDER)


def test_a_right_device_gets_a_passport_that_a_node_shows_until_something_changes(emulated, certified):
    passport, checks = certified
    assert (passport["verdict"], passport["emulated"]) == ("certified", True)
    assert passport["reference"] == "stored", (
        "the references of the package are of the models as they are converted now"
    )
    assert {check["status"] for check in checks.values()} == {"passed", "skipped"}
    assert [name for name, check in checks.items() if check["status"] == "skipped"] == [
        "energy",
        "suspend and resume",
        "endurance",
    ]
    assert checks["agreement with the CPU"]["values"]["lowest"] > 0.99
    assert checks["energy"]["detail"] == "the NPU is emulated"
    assert passport["efficiency"] == {"tokens_per_joule": None, "texts_per_joule": None}
    assert "Emulated on a CPU" in (emulated.parent / f"{EMBEDDER}.NPU-emulated.html").read_text()
    assert "certified" in run("passports", "--config", emulated, "list")
    with start_node("--config", str(emulated), ready=False) as node:
        node.wait_for(lambda body: body["models"][0]["state"] == "ready")
        assert [model["engines"][0]["certified"] for model in node.health()[1]["models"][:2]] == [
            "certified",
            "not certified",
        ]
    other = json.dumps([{"name": EMBEDDER, "npu_buckets": [64], "placements": ["NPU"]}])
    with start_node("--config", str(emulated), NPU_NODE_MODELS=other) as node:
        assert node.health()[1]["models"][0]["engines"][0]["certified"] == "expired"


def test_a_node_that_requires_passports_takes_none_of_an_emulated_npu(emulated, certified):
    with start_node("--config", str(emulated), ready=False, NPU_NODE_REQUIRE_CERTIFIED="true") as node:
        model = node.wait_for(lambda body: body["status"] == "failed")["models"][0]
        assert "require_certified is set, and its passport is of an emulated NPU" in model["reason"]


def test_passports_are_listed_by_placement(tmp_path, emulated, certified):
    def listed(**variables):
        return json.loads(run("passports", "--config", emulated, "list", "--json", **variables))

    [before, *_] = listed(NPU_NODE_PASSPORTS=str(tmp_path))
    assert (before["configured"], before["device"], before["emulated"]) == (EMBEDDER, "NPU", True)
    assert (before["state"], before["verdict"], before["made"]) == ("not certified", None, None)
    [after, *_] = listed()
    assert (after["state"], after["verdict"], after["made"]) == ("certified", "certified", certified[0]["made"])

    other = {"name": EMBEDDER, "npu_buckets": [64], "placements": ["NPU"]}
    [expired] = listed(NPU_NODE_MODELS=json.dumps([other]))
    assert (expired["state"], expired["verdict"]) == ("expired", "certified")
    on_cpu, unused = listed(NPU_NODE_MODELS=json.dumps([other | {"placements": ["CPU"]}]))
    assert (on_cpu["device"], on_cpu["state"]) == ("CPU", "not certified")
    assert (unused["device"], unused["configured"], unused["state"]) == ("NPU", None, None)
    assert unused["verdict"] == "certified"


def test_a_passport_covers_no_longer_prompts_than_were_examined(tmp_path, emulated, quick_models):
    wanted = only(AGREEMENT, "largest right prompt", "structured output")
    words = ["certify", WRITER, "--config", emulated, "--quick", *wanted, "--out", tmp_path]
    run(*words, NPU_NODE_NPU_TOKEN_LIMIT="64", **quick_models)
    report, checks = passport_of(tmp_path, WRITER, "report")
    assert (report["verdict"], report["limits"]["max_prompt_tokens"]) == ("incomplete", 64)
    assert "the window is too small for a tool" in checks["structured output"]["detail"]


def test_a_slow_compile_is_measured(tmp_path, emulated):
    (tmp_path / "faults.toml").write_text('[[fault]]\nkind = "slow_compile"\nseconds = 3\n')
    words = ["certify", EMBEDDER, "--config", emulated, *only("canary"), "--out", tmp_path]
    run(*words, NPU_NODE_FAULTS=str(tmp_path / "faults.toml"))
    report, checks = passport_of(tmp_path, EMBEDDER, "report")
    assert checks["load"]["values"]["seconds"] > 3
    assert report["verdict"] == "incomplete"


def test_the_largest_right_prompt_is_found_and_the_router_keeps_to_it(tmp_path, emulated, quick_models):
    faults = tmp_path / "faults.toml"
    faults.write_text('[[fault]]\nkind = "garbage"\nbeyond_tokens = 80\n')
    wanted = only(AGREEMENT, "largest right prompt")
    words = ["certify", WRITER, "--config", emulated, "--quick", *wanted, "--out", tmp_path]
    run(*words, NPU_NODE_FAULTS=str(faults), **quick_models)
    report, _ = passport_of(tmp_path, WRITER, "report")
    limit = report["limits"]["max_prompt_tokens"]
    assert 80 - 32 <= limit <= 80

    both = [{"name": WRITER, "max_prompt_len": 160, "min_response_len": 32, "placements": ["NPU", "CPU"]}]
    PassportStore(tmp_path / "passports").sign_and_store(Passport.model_validate(report | {"verdict": "limited"}))
    own = {"NPU_NODE_PASSPORTS": str(tmp_path / "passports"), "NPU_NODE_FAULTS": str(faults)} | quick_models
    with start_node("--config", str(emulated), NPU_NODE_MODELS=json.dumps(both), **own) as node:
        engines = node.health()[1]["models"][0]["engines"]
        assert (engines[0]["certified"], engines[0]["prompt_limit"]) == ("limited", limit)
        for words, device in ((20, "NPU"), (100, "CPU")):
            body = {"model": WRITER, "prompt": "word " * words, "max_tokens": 2}
            reply = httpx.post(f"{node.url}/v1/completions", json=body, timeout=120)
            assert (reply.status_code, reply.headers["X-NPU-Node-Device"]) == (200, device)


def exit_status(words):
    with pytest.raises(SystemExit) as ended:
        main(words)
    return ended.value.code


@pytest.fixture
def refused(capsys, monkeypatch):
    """A function that runs a command, which must fail, in this process; what it says."""

    def run(*words, status=1, **variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        ended = main if status == 1 else exit_status
        assert ended([str(word) for word in words]) == status
        return capsys.readouterr().err

    return run


def test_a_reference_is_of_the_same_weights_and_complete(refused, tmp_path, emulated):
    words = ["certify", EMBEDDER, "--config", emulated, "--out", tmp_path, "--reference", tmp_path / "r.gz"]
    (tmp_path / "r.gz").write_bytes(gzip.compress(json.dumps({"key": "another", "answers": {}}).encode()))
    assert "must hold answers for" in refused(*words)
    (tmp_path / "r.gz").write_bytes(b"{}")
    assert "must be a file that --make-reference wrote" in refused(*words)


def test_wrong_arguments_are_refused_before_anything_is_loaded(refused, tmp_path, emulated):
    (tmp_path / "file").touch()
    words = ["certify", EMBEDDER, "--config", emulated, "--out"]
    assert "results must go to directories that can be written" in refused(*words, tmp_path / "file")
    assert "--check must be one of agreement with the CPU, " in refused(*words, tmp_path, "--check", "luck")
    for minutes in ("-1", "nan", "inf"):
        assert "must be from 0 to 1440 minutes" in refused("certify", "--endurance", minutes, status=2)
    kept = {"NPU_NODE_PASSPORTS": str(tmp_path / "file" / "passports")}
    assert "cannot be written" in refused(*words, tmp_path, **kept)


def test_a_model_of_the_settings_is_found_by_every_name(tmp_path, emulated, certified):
    models = json.dumps([{"name": "minilm", "npu_buckets": [32], "placements": ["NPU"]}])
    run("certify", EMBEDDER, "--config", emulated, *only("canary"), "--out", tmp_path, NPU_NODE_MODELS=models)
    report, _ = passport_of(tmp_path, EMBEDDER, "report")
    assert report["settings_hash"] == certified[0]["settings_hash"]
