"""Every query of every panel, and every rule, on a real Prometheus that scraped loaded nodes and a service."""

import contextlib
import json
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from decimal import Decimal
from pathlib import Path

import pytest
import yaml

from backend_client.gateway.keys import KeyStore
from backend_client.http.messages import encode_form
from tests.ops.calls import call
from tests.ops.test_grafana_dashboards import EACH
from tests.ops.test_tls_expiry import make_certificate, read_ends
from tests.support.cross_encoders import write_tiny
from tests.support.energy import Sysfs
from tests.support.gateway import start_gateway
from tests.support.nodes import start_node
from tests.support.ports import free_port
from tests.support.speech import SPEECH
from tests.support.whisper import MODEL as WHISPER

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("store"), pytest.mark.timeout(2400)]

RULES = Path(__file__).parents[2] / "config" / "prometheus" / "alerts.yml"
EMBEDDER, WRITER = "all-minilm-l6-v2", "smollm2-135m-instruct"
DEAD = "127.0.0.1:1"
# Limits are for a hang: a query is asked until it is answered, and a busy machine makes little to measure in a while.
HANG_S = 600
# What rates are over: so long that a scrape or two may be missed, and each call may take seconds.
RATE = "1m"
# What an emulated NPU has not; the second node reads it where a test has written it, as the kernel would.
OF_A_DEVICE_ONLY = {"NPU memory", "NPU clock"}


class Server:
    """A Prometheus process; `ask` queries it."""

    def __init__(self, process, url):
        self.process = process
        self.url = url

    def get(self, path):
        return call(self.url + path)[1]["data"]

    def ready(self):
        try:
            with urllib.request.urlopen(self.url + "/-/ready", timeout=HANG_S):  # noqa: S310
                return True
        except urllib.error.HTTPError as error:
            error.close()
            return False

    def ask(self, expression):
        """The samples of an instant query that are numbers."""
        query = urllib.parse.urlencode({"query": expression})
        result = self.get(f"/api/v1/query?{query}")["result"]
        return [sample for sample in result if sample["value"][1] != "NaN"]

    def wait(self, condition, what):
        deadline = time.monotonic() + HANG_S
        while not (found := condition()):
            assert self.process.poll() is None, "Prometheus ended"
            assert time.monotonic() < deadline, f"still no {what}"
            time.sleep(0.25)
        return found


@contextlib.contextmanager
def process(*command, **options):
    running = subprocess.Popen(command, text=True, **options)
    try:
        yield running
    finally:
        running.terminate()
        running.wait(HANG_S)
        for stream in (running.stdout, running.stderr):
            if stream is not None:
                stream.close()


@contextlib.contextmanager
def prometheus(directory, jobs, gateway_key):
    """A Prometheus that scrapes the jobs' targets every second and evaluates our rules."""
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [
            {
                "job_name": name,
                "static_configs": [{"targets": targets}],
                "metrics_path": "/metrics.txt" if name == "machine" else "/metrics",
            }
            | ({"authorization": {"credentials": gateway_key}} if name == "npu-gateway" else {})
            for name, targets in jobs.items()
        ],
    }
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = (
        shutil.which("prometheus"),
        f"--config.file={directory / 'prometheus.yml'}",
        f"--storage.tsdb.path={directory / 'data'}",
        "--web.listen-address=127.0.0.1:0",
        "--log.format=json",
    )
    with process(*command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as running:
        for line in running.stderr:
            told = json.loads(line)
            if told.get("msg") == "Listening on":
                break
        else:
            pytest.fail("Prometheus does not listen")
        # Nobody reads the rest, and a full pipe would stop it.
        drain = threading.Thread(target=running.stderr.read, daemon=True)
        drain.start()
        server = Server(running, f"http://{told['address']}")
        server.wait(server.ready, "readiness")
        yield server
    drain.join()


@contextlib.contextmanager
def started_gateway(directory, nodes):
    """A gateway in front of these nodes; its URL, and a key for calls and for its metrics."""
    with contextlib.closing(KeyStore(directory / "gateway.db")) as store:
        key = store.add("team-a", spend_cap=Decimal(10))
    with start_gateway(*nodes, NPU_GATEWAY_KEYS=str(directory / "gateway.db")) as url:
        yield url, key


class Load(threading.Thread):
    """Calls that the service does not make: other dialects and tasks, long prompts, refusals, the gateway."""

    def __init__(self, nodes, gateway, key):
        super().__init__()
        self._nodes, self._gateway, self._key = nodes, gateway, key
        shortest = min((file.read_bytes() for file in SPEECH), key=len)
        self._speech = encode_form({"model": WHISPER}, "speech.ogg", shortest)
        self._over = threading.Event()

    def run(self):
        chat = {"model": WRITER, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
        turn = 0
        while not self._over.is_set():
            turn += 1
            for url in self._nodes:
                call(url + "/v1/chat/completions", body=chat)
                call(url + "/api/embed", body={"model": EMBEDDER, "input": f"turn {turn}"})
                # Longer than the first node's NPU takes, so it goes to the CPU.
                call(url + "/embeddings", body={"texts": ["word " * 60 + str(turn)]})
                call(url + "/embeddings", body={"texts": [1]})
                call(url + "/rerank", body={"query": "a", "texts": ["b c", str(turn)]})
            call(self._nodes[0] + "/v1/audio/transcriptions", None, *self._speech)
            call(self._gateway + "/v1/chat/completions", self._key, chat)
            for key in (self._key, None):
                call(self._gateway + "/v1/embeddings", key, {"model": EMBEDDER, "input": "hello"})

    def stop(self):
        self._over.set()
        self.join()


@pytest.fixture(scope="module")
def watched(tmp_path_factory, speech_store):
    """Prometheus, with two nodes under load, a service and a gateway that call them, and a node that is dead."""
    if shutil.which("prometheus") is None:
        pytest.skip("NOT RUN: the queries are asked of a real Prometheus; apt-get install prometheus")
    sysfs = tmp_path_factory.mktemp("sysfs")
    (sysfs / "npu_busy_time_us").write_text("1000000\n")
    (sysfs / "npu_memory_utilization").write_text("268435456\n")
    (sysfs / "npu_current_frequency_mhz").write_text("1400\n")
    npu_first = {"name": EMBEDDER, "placements": ["NPU", {"device": "CPU", "load": "eager"}], "npu_buckets": [32]}
    writer = {"name": WRITER, "placements": ["CPU"]}
    listener = {"name": WHISPER, "placements": ["CPU"]}
    ranker = tmp_path_factory.mktemp("ranker") / "tiny"
    write_tiny(ranker)
    emulated = {
        "NPU_NODE_NPU_EMULATION": "1",
        "NPU_NODE_MODELS": json.dumps([npu_first, writer, listener, {"path": str(ranker), "placements": ["CPU"]}]),
        "NPU_NODE_CANARY_INTERVAL_S": "5",
        "NPU_NODE_MODEL_STORE": str(speech_store.root),
    }
    # Machines of CI have no counter that can be read.
    energy = Sysfs(tmp_path_factory.mktemp("energy"))
    emulated["NPU_NODE_ENERGY_SYSFS"] = str(energy.root)
    with contextlib.ExitStack() as stack:
        stack.enter_context(energy.working())
        first = stack.enter_context(start_node(**emulated))
        second = stack.enter_context(start_node(NPU_NODE_NPU_SYSFS=str(sysfs)))
        urls = [first.url, second.url]
        service = stack.enter_context(
            process(sys.executable, "-m", "tests.ops.client_service", *urls, stdout=subprocess.PIPE)
        )
        port = int(service.stdout.readline())
        tls = tmp_path_factory.mktemp("tls")
        (tls / "metrics.txt").write_text(read_ends(make_certificate(tls, "node", 90)))
        exporter = free_port()
        options = (str(exporter), "--bind=127.0.0.1", f"--directory={tls}")
        stack.enter_context(process(sys.executable, "-m", "http.server", *options, stderr=subprocess.DEVNULL))
        gateway, key = stack.enter_context(started_gateway(tmp_path_factory.mktemp("gateway"), urls))
        load = Load(urls, gateway, key)
        load.start()
        stack.callback(load.stop)
        hosts = [url.removeprefix("http://") for url in urls]
        jobs = {
            "npu-node": [*hosts, DEAD],
            "npu-client": [f"127.0.0.1:{port}"],
            "npu-gateway": [gateway.removeprefix("http://")],
            "machine": [f"127.0.0.1:{exporter}"],
        }
        server = stack.enter_context(prometheus(tmp_path_factory.mktemp("prometheus"), jobs, key))
        yield server, hosts


@pytest.mark.parametrize("panel", EACH)
def test_every_query_of_a_panel_returns_data(watched, panel):
    server, (first, second) = watched
    instance = second if panel["title"] in OF_A_DEVICE_ONLY else first
    for target in panel["targets"]:
        expression = target["expr"].replace("$__rate_interval", RATE).replace("$instance", instance)
        assert "$" not in expression
        server.wait(lambda asked=expression: server.ask(asked), f"answer to {expression}")


def test_every_rule_is_evaluated_and_the_dead_node_is_seen(watched):
    server, _ = watched

    def evaluated():
        groups = server.get("/api/v1/rules")["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        return rules if all(rule["health"] == "ok" for rule in rules) else None

    rules = server.wait(evaluated, "evaluation without an error")
    assert len(rules) >= 15
    # A rule over a metric that nothing exports would be well and never fire.
    read = {name for rule in rules for name in re.findall(r"\b(?:npu|gen_ai)(?:_|:)[\w:]+", rule["query"])}
    server.wait(lambda: read <= set(server.get("/api/v1/label/__name__/values")), f"metrics {read}")

    def down():
        """Of the dead node alone: a live one that missed a scrape is down until the next."""
        [rule] = [rule for rule in evaluated() or [] if rule["name"] == "NPUNodeDown"] or [{"alerts": []}]
        return [alert["labels"]["instance"] for alert in rule["alerts"]] == [DEAD]

    server.wait(down, f"alert of {DEAD} alone")


def test_the_emulated_npu_is_labelled_in_what_prometheus_keeps(watched):
    server, (first, second) = watched
    found = server.wait(
        lambda: server.ask(f'rate(npu_node_npu_device_busy_seconds_total{{instance="{first}"}}[{RATE}]) > 0'),
        "busy NPU",
    )
    assert found[0]["metric"]["emulated"] == "true"
    [real] = server.wait(lambda: server.ask(f'npu_node_npu_memory_bytes{{instance="{second}"}}'), "NPU memory")
    assert (real["metric"]["emulated"], real["value"][1]) == ("false", "268435456")
