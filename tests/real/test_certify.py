"""npu-node certify with real engines: what is right is certified, and each fault on demand is found and named."""

import json
import os
import subprocess

import httpx
import pytest

from tests.support.nodes import NPU_NODE, start_node
from worker_node.models.store import ModelStore

pytestmark = [pytest.mark.real, pytest.mark.timeout(900), pytest.mark.usefixtures("store")]

EMBEDDER, WRITER, HEARER = "all-minilm-l6-v2", "smollm2-135m-instruct", "whisper-tiny.en"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("certify")


@pytest.fixture(scope="module")
def emulated(directory):
    """The settings of a node with the emulated NPU in short shapes; its passports are of this module alone."""
    config = directory / "node.toml"
    config.write_text(
        f'passports = "{directory}/passports"\nnpu_emulation = true\nwatchdog_s = 3.0\ncrash_limit = 2\n'
        f'[[models]]\nname = "{EMBEDDER}"\nnpu_buckets = [32]\nplacements = ["NPU"]\n'
        f'[[models]]\nname = "{WRITER}"\nmax_prompt_len = 320\nmin_response_len = 32\nplacements = ["NPU"]\n'
        f'[[models]]\nname = "{HEARER}"\nplacements = ["NPU"]\n'
    )
    return config


def run(*words, status=0, **variables):
    environment = os.environ | {"NPU_NODE_CONFIG": ""} | variables
    done = subprocess.run([*NPU_NODE, *map(str, words)], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def checks_of(out, model, device="NPU-emulated"):
    passport = json.loads((out / f"{model}.{device}.passport.json").read_text())
    return passport, {check["name"]: check for check in passport["checks"]}


def only(*names):
    return [word for name in names for word in ("--check", name)]


@pytest.fixture(scope="module")
def reference(directory, emulated):
    """What the CPU answered, once for all; and the passport of the embedder on the emulated NPU."""
    stored = directory / "reference.json"
    wanted = only("canary", "agreement with the CPU", "busy counter", "killed engine")
    run("certify", EMBEDDER, "--config", emulated, "--quick", *wanted, "--out", directory, "--make-reference", stored)
    return stored


def test_a_right_device_gets_a_passport_that_a_node_shows_until_something_changes(directory, emulated, reference):
    passport, checks = checks_of(directory, EMBEDDER)
    assert (passport["verdict"], passport["emulated"], passport["reference"]) == ("certified", True, "this CPU")
    assert {check["status"] for check in checks.values()} == {"passed"}
    assert checks["agreement with the CPU"]["values"]["lowest"] > 0.99
    page = (directory / f"{EMBEDDER}.NPU-emulated.html").read_text()
    assert "Emulated on a CPU" in page
    assert "http" not in page.replace("http-equiv", ""), "it needs nothing from elsewhere"
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


def test_a_node_that_requires_certificates_takes_none_of_an_emulated_npu(directory, emulated, reference):
    with start_node("--config", str(emulated), ready=False, NPU_NODE_REQUIRE_CERTIFIED="true") as node:
        model = node.wait_for(lambda body: body["status"] == "failed")["models"][0]
        assert "require_certified is set, and its passport is of an emulated NPU" in model["reason"]


def test_a_node_that_requires_passports_can_get_its_first_one(directory, emulated):
    config = directory / "required.toml"
    config.write_text("require_certified = true\n" + emulated.read_text().replace("/passports", "/first"))

    def listed(**variables):
        return json.loads(run("passports", "--config", config, "list", "--json", **variables))

    [before, *_] = listed()
    assert (before["configured"], before["device"], before["emulated"]) == (EMBEDDER, "NPU", True)
    assert (before["state"], before["verdict"], before["made"]) == ("not certified", None, None)
    run("certify", EMBEDDER, "--config", config, "--quick", *only("canary"), "--out", directory / "first")
    passport, _ = checks_of(directory / "first", EMBEDDER)
    [after, *_] = listed()
    assert (after["state"], after["verdict"], after["made"]) == ("certified", "certified", passport["made"])

    other = {"name": EMBEDDER, "npu_buckets": [64], "placements": ["NPU"]}
    [expired] = listed(NPU_NODE_MODELS=json.dumps([other]))
    assert (expired["state"], expired["verdict"]) == ("expired", "certified")
    on_cpu, unused = listed(NPU_NODE_MODELS=json.dumps([other | {"placements": ["CPU"]}]))
    assert (on_cpu["device"], on_cpu["state"]) == ("CPU", "not certified")
    assert (unused["device"], unused["configured"], unused["state"]) == ("NPU", None, None)
    assert unused["verdict"] == "certified"


FAULTS = [
    (EMBEDDER, 'kind = "garbage"\nafter = 1', "agreement with the CPU", "vectors are not the CPU's"),
    (EMBEDDER, 'kind = "still_counter"', "busy counter", "the busy counter stood still"),
    (EMBEDDER, 'kind = "lost_device"\nafter = 3', "agreement with the CPU", "HTTP 50"),
    (EMBEDDER, 'kind = "crash"\nafter = 3', "agreement with the CPU", "HTTP 50"),
    (EMBEDDER, 'kind = "hang"\nafter = 3', "agreement with the CPU", "HTTP 50"),
    (EMBEDDER, 'kind = "garbage"', "load", "its known question was answered wrongly"),
    (HEARER, 'kind = "stale_audio"\nafter = 1', "two recordings in turn", "the text of the recording before"),
]


@pytest.mark.parametrize(
    ("model", "fault", "check", "said"), FAULTS, ids=lambda value: str(value).replace("\n", " ")[:40]
)
def test_each_fault_on_demand_is_found_and_named(tmp_path, emulated, reference, model, fault, check, said):
    if model == HEARER:
        ModelStore().pull(HEARER)
    faults = tmp_path / "faults.toml"
    faults.write_text(f"[[fault]]\n{fault}\n")
    given = ["--reference", reference] if model == EMBEDDER else []
    words = ["certify", model, "--config", emulated, "--quick", *only(check), *given, "--out", tmp_path]
    run(*words, status=1, NPU_NODE_FAULTS=str(faults), NPU_NODE_PASSPORTS=str(tmp_path / "passports"))
    passport, checks = checks_of(tmp_path, model)
    assert passport["verdict"] == "failed"
    assert checks[check]["status"] == "failed"
    assert said in checks[check]["detail"]


def test_the_largest_right_prompt_is_found_and_the_router_keeps_to_it(tmp_path, emulated):
    faults = tmp_path / "faults.toml"
    faults.write_text('[[fault]]\nkind = "garbage"\nbeyond_tokens = 200\n')
    own = {"NPU_NODE_PASSPORTS": str(tmp_path / "passports"), "NPU_NODE_FAULTS": str(faults)}
    wanted = only("agreement with the CPU", "largest prompt that is answered rightly")
    run("certify", WRITER, "--config", emulated, "--quick", *wanted, "--out", tmp_path, **own)
    passport, _ = checks_of(tmp_path, WRITER)
    limit = passport["limits"]["max_prompt_tokens"]
    assert passport["verdict"] == "limited"
    assert 200 - 32 <= limit <= 200
    both = json.dumps([{"name": WRITER, "max_prompt_len": 320, "min_response_len": 32, "placements": ["NPU", "CPU"]}])
    with start_node("--config", str(emulated), NPU_NODE_MODELS=both, **own) as node:
        engines = node.health()[1]["models"][0]["engines"]
        assert (engines[0]["certified"], engines[0]["prompt_limit"]) == ("limited", limit)
        for words, device in ((20, "NPU"), (250, "CPU")):
            body = {"model": WRITER, "prompt": "word " * words, "max_tokens": 2}
            reply = httpx.post(f"{node.url}/v1/completions", json=body, timeout=120)
            assert (reply.status_code, reply.headers["X-NPU-Node-Device"]) == (200, device)


def test_a_reference_of_another_model_is_refused(tmp_path, emulated, reference):
    text = json.loads(reference.read_text()) | {"key": "another"}
    (tmp_path / "r.json").write_text(json.dumps(text))
    done = subprocess.run(
        [*NPU_NODE, "certify", EMBEDDER, "--config", emulated, "--reference", tmp_path / "r.json", "--out", tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "holds answers of another model or OpenVINO" in done.stderr


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("kind = 1", "fault"),
        ("[[fault]]\nkind = 'tired'", "fault.0.kind"),
        ("[[fault]]\nkind = 'crash'\nevery = 0", "fault.0.every"),
        ("[[fault", "not: "),
    ],
)
def test_a_file_of_faults_is_checked(tmp_path, text, problem):
    (tmp_path / "f.toml").write_text(text)
    environment = os.environ | {"NPU_NODE_NPU_EMULATION": "1", "NPU_NODE_CONFIG": ""}
    command = [*NPU_NODE, "serve", "--port", "0", "--faults", str(tmp_path / "f.toml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert done.returncode != 0
    assert problem in done.stderr


def test_faults_are_for_emulation_unless_they_are_allowed(tmp_path):
    (tmp_path / "f.toml").write_text("[[fault]]\nkind = 'crash'\n")
    environment = {name: value for name, value in os.environ.items() if name != "NPU_NODE_NPU_EMULATION"}
    command = [*NPU_NODE, "serve", "--port", "0", "--faults", str(tmp_path / "f.toml")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=environment | {"NPU_NODE_CONFIG": ""}, check=False
    )
    assert done.returncode != 0
    assert "faults are for nodes with npu_emulation, or with allow_faults" in done.stderr
