"""Joules of answers: a real node reads a recorded tree of sysfs whose counters the test moves."""

import asyncio
import re

import pytest

from tests.real.certifying import only, passport_of, run
from tests.real.inference import ask, stream
from tests.support.energy import COUNTS_PER_JOULE, Sysfs
from tests.support.nodes import start_node

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

MODELS = """
[[models]]
name = "all-minilm-l6-v2"
npu_buckets = [32]
placements = ["NPU", "CPU"]

[[models]]
name = "smollm2-135m-instruct"
max_prompt_len = 64
min_response_len = 96
cache_size_gb = 1
placements = ["NPU", "CPU"]
"""


@pytest.fixture(scope="module")
def sysfs(tmp_path_factory):
    return Sysfs(tmp_path_factory.mktemp("sysfs"))


@pytest.fixture(scope="module")
def node(quick_models, tmp_path_factory, sysfs):
    config = tmp_path_factory.mktemp("energy") / "node.toml"
    config.write_text(MODELS)
    environment = {
        "NPU_NODE_NPU_EMULATION": "1",
        "NPU_NODE_CANARY_INTERVAL_S": "86400",
        "NPU_NODE_ENERGY_SYSFS": str(sysfs.root),
    } | quick_models
    with start_node("--config", str(config), ready=False, **environment) as running:
        running.wait_for(lambda body: body["status"] == "ready", timeout=240)
        yield running


async def metric(http, node, **labels):
    async with http.get(node.url + "/metrics") as reply:
        text = await reply.text()
    shown = re.findall(r"^npu_node_energy_joules_total\{(.*)\} (\S+)$", text, re.MULTILINE)
    wanted = {f'{name}="{value}"' for name, value in labels.items()}
    return sum(float(value) for names, value in shown if wanted <= set(names.split(",")))


async def test_an_answer_of_the_npu_names_what_its_counter_moved_by(node, http, sysfs):
    events = []

    def on_event(name, data):
        events.append((name, data))
        if len(events) == 1:
            sysfs.use_npu(5 * COUNTS_PER_JOULE // 2 + 1)

    asked = {"prompt": "Count to one hundred.", "max_new_tokens": 80, "ignore_eos": True}
    before = await metric(http, node, model="smollm2-135m-instruct", device="NPU")
    await stream(http, node, asked, on_event)
    done = events[-1][1]
    assert (events[-1][0], done["device"], done["emulated"]) == ("done", "NPU", True)
    assert done["joules"] == pytest.approx(2.5 + 1 / COUNTS_PER_JOULE, abs=5e-7)
    assert "joules_reason" not in done
    after = await metric(http, node, model="smollm2-135m-instruct", device="NPU", emulated="true")
    assert after - before == pytest.approx(2.5 + 1 / COUNTS_PER_JOULE)


@pytest.mark.parametrize("device", ["NPU", "CPU"])
@pytest.mark.parametrize(
    ("path", "model", "bodies"),
    [
        ("/embeddings", "all-minilm-l6-v2", [{"texts": ["the sea " * count]} for count in range(1, 7)]),
        (
            "/inference",
            "smollm2-135m-instruct",
            [{"prompt": "Count.", "max_new_tokens": count, "ignore_eos": True} for count in (5, 9, 13)],
        ),
    ],
)
async def test_reply_header_metric_and_dashboard_agree(node, http, sysfs, device, path, model, bodies):
    """Of requests at the same time, which share a counter."""
    headers = {"X-NPU-Require-Device": device}
    before = await metric(http, node, model=model, device=device)
    whole = await metric(http, node)
    package = int(sysfs.package.read_text())
    with sysfs.working():
        # A placement that is not loaded yet is loaded for a request that requires it.
        replies = await asyncio.gather(*(ask(http, node, body | {"model": model}, headers, path) for body in bodies))
    moved = (int(sysfs.package.read_text()) - package) / 1e6

    # A text may be computed between two movements of the counter.
    joules = [body["joules"] for _, body in replies if body["joules"] is not None]
    shown = [float(head["X-NPU-Node-Joules"]) for head, _ in replies if "X-NPU-Node-Joules" in head]
    assert shown == joules != []
    counted = await metric(http, node, model=model, device=device) - before
    assert counted == pytest.approx(sum(joules), abs=1e-5)
    assert await metric(http, node) - whole == pytest.approx(counted, abs=1e-9)
    if device == "CPU":
        assert counted <= moved

    async with http.get(node.url + "/dashboard/state") as reply:
        energy = (await reply.json())["energy"]
    what = "texts" if path == "/embeddings" else "tokens"
    assert energy[what]["made"] >= len(bodies)
    assert energy[what]["joules"] == pytest.approx(await metric(http, node, model=model), abs=1e-5)


async def test_a_counter_that_cannot_be_true_gives_null_and_says_so(node, http, sysfs):
    def on_event(name, data):
        events.append(data)
        if len(events) == 1:
            sysfs.use_npu(-COUNTS_PER_JOULE)

    events = []
    await stream(http, node, {"prompt": "Count.", "max_new_tokens": 80, "ignore_eos": True}, on_event)
    assert events[-1]["joules"] is None
    assert events[-1]["joules_reason"].startswith("the counter is not believed: it went from ")


async def test_a_counter_that_stands_still_gives_null_and_says_so(node, http):
    headers, body = await ask(http, node, {"texts": ["a still counter"]}, path="/embeddings")
    assert (body["joules"], body["joules_reason"]) == (None, "the counter did not move during the run")
    assert "X-NPU-Node-Joules" not in headers


@pytest.mark.parametrize(("model", "what"), [("all-minilm-l6-v2", "texts"), ("smollm2-135m-instruct", "tokens")])
def test_a_certification_has_the_work_of_a_joule_and_what_supplied_the_machine(
    tmp_path, sysfs, quick_models, model, what
):
    adapter = sysfs.root / "power_supply" / "dock"
    adapter.mkdir(parents=True, exist_ok=True)
    for name, value in {"type": "USB", "online": 1, "voltage_max": 20_000_000, "current_max": 5_000_000}.items():
        (adapter / name).write_text(f"{value}\n")
    (tmp_path / "freq").mkdir()
    (tmp_path / "freq" / "hw_max_freq").write_text("1950\n")
    (tmp_path / "npu_busy_time_us").write_text("0\n")
    config = tmp_path / "node.toml"
    config.write_text(
        f'npu_emulation = true\nenergy_sysfs = "{sysfs.root}"\nnpu_sysfs = "{tmp_path}"\n'
        f'passports = "{tmp_path}/passports"\n{MODELS}'
    )
    with sysfs.working():
        run("certify", model, "--config", config, *only("energy"), "--out", tmp_path, **quick_models)
    report, checks = passport_of(tmp_path, model, "report")
    check = checks["energy"]
    assert check["status"] == "passed"
    assert check["values"][what] == 64
    work = report["efficiency"][f"{what}_per_joule"]
    assert work == pytest.approx(64 / check["values"]["joules"], rel=1e-3)
    power = report["power"]
    assert (power["source"], power["adapter_watts"], power["npu_mhz"]["max"]) == ("AC", 100.0, 1950)
