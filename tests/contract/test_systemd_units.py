"""The units that are shipped: their exposure by systemd's own measure, and what node and gateway need of them."""

import configparser
import inspect
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from aiohttp import web

from worker_node.bounded.settings import BoundedSettings
from worker_node.engines.process import EngineLimits
from worker_node.settings import NodeSettings

CONFIG = Path(__file__).parents[2] / "config"
UNITS = sorted((CONFIG / "systemd").glob("*.service"))
NODE_UNITS = [path for path in UNITS if path.stem.startswith("npu-node")]
GATEWAY = next(path for path in UNITS if path.stem == "npu-gateway")
ACCEPTED_EXPOSURE = 2.0


class _Repeated(dict):
    """A section in which a key may come again, as systemd allows: its values in order, one a line."""

    def __setitem__(self, key, value):
        if key in self and isinstance(value, list):
            value = self[key] + value
        super().__setitem__(key, value)


def read(path):
    parser = configparser.ConfigParser(dict_type=_Repeated, strict=False, interpolation=None)
    parser.optionxform = str
    parser.read_string(path.read_text(encoding="utf-8"))
    return parser["Service"]


@pytest.fixture
def analyze():
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("NOT RUN: systemd-analyze is not installed")

    def run(*arguments):
        return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60, check=False)

    return run


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_units_stay_below_the_accepted_exposure(analyze, path):
    threshold = f"--threshold={ACCEPTED_EXPOSURE * 10:.0f}"
    done = analyze("security", "--offline=true", "--no-pager", threshold, str(path))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_systemd_knows_every_line_of_a_unit(analyze, path, tmp_path):
    # Its program is not installed here, which verify would complain of.
    unit = tmp_path / path.name
    unit.write_text(re.sub(r"(?m)^ExecStart=.*", "ExecStart=/bin/true", path.read_text(encoding="utf-8")))
    done = analyze("verify", "--man=no", "--recursive-errors=no", str(unit))
    told = [line for line in done.stderr.splitlines() if path.name in line]
    assert (done.returncode, told) == (0, [])


@pytest.mark.parametrize("path", NODE_UNITS, ids=lambda path: path.stem)
def test_what_the_node_needs_is_left_to_it(path):
    service = read(path)
    assert service["Type"] == "notify"
    assert int(service["WatchdogSec"]) >= 10
    assert service["DevicePolicy"] == "closed"
    assert "char-accel rw" in service["DeviceAllow"].split("\n")
    assert "PrivateDevices" not in service, "it hides /dev/accel"
    assert "AF_NETLINK" in service["RestrictAddressFamilies"].split(), (
        "the kernel announces recoveries of the NPU by it"
    )
    assert "PrivateNetwork" not in service, "the kernel's announcements would not reach it"
    assert "TimeoutStartSec" not in service, "it is started when it listens: no model is compiled by then"
    assert "MemoryDenyWriteExecute" not in service, "it breaks code that is compiled at run time"


def test_whatever_waits_for_a_first_compile_waits_as_long_as_the_node_lets_it_take():
    """Others saw 11 minutes on an idle machine: docs/npu-facts.md."""
    load_s = NodeSettings().load_timeout_s
    assert load_s == EngineLimits().load_timeout_s == BoundedSettings().node_settings().load_timeout_s
    assert load_s > 15 * 60
    role = (CONFIG.parent / "ansible" / "roles" / "npu_node" / "defaults" / "main.yml").read_text(encoding="utf-8")
    assert int(re.findall(r"^npu_node_ready_timeout_s: (\d+)$", role, re.MULTILINE)[0]) >= load_s
    image = (CONFIG / "container" / "Containerfile").read_text(encoding="utf-8")
    (minutes,) = re.findall(r"--start-period=(\d+)m CMD .*healthcheck.py", image)
    assert int(minutes) * 60 >= load_s


@pytest.mark.parametrize("path", NODE_UNITS, ids=lambda path: path.stem)
def test_a_drain_has_its_time(path):
    assert int(read(path)["TimeoutStopSec"]) >= 30
    assert read(path)["KillMode"] == "mixed", "engines must live until the node has drained"


def test_keys_come_as_a_credential():
    service = read(next(path for path in UNITS if path.stem == "npu-node"))
    assert service["LoadCredential"] == "api_keys:/etc/npu-node/api_keys"
    assert "NPU_NODE_API_KEYS_FILE=%d/api_keys" in service["Environment"]
    assert "User" in service


def test_the_gateway_writes_its_keys_alone_and_has_no_device():
    service = read(GATEWAY)
    assert (service["User"], service["StateDirectory"], service["UMask"]) == ("npu-gateway", "npu-gateway", "0077")
    assert service["ProtectSystem"] == "strict"
    assert "ReadWritePaths" not in service
    assert (service["PrivateDevices"], service["MemoryDenyWriteExecute"]) == ("yes", "yes")
    assert "NPU_GATEWAY_KEYS=%S/npu-gateway/gateway.db" in service["Environment"]
    assert service["EnvironmentFile"] == "/etc/npu-gateway/gateway.env", "without '-': no node is a mistake"


def test_the_gateways_requests_end_before_it_is_killed():
    assert (
        int(read(GATEWAY)["TimeoutStopSec"]) > inspect.signature(web.BaseRunner).parameters["shutdown_timeout"].default
    )
