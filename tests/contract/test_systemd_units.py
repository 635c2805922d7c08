"""The units that are shipped: their exposure by systemd's own measure, and what the node needs of them."""

import configparser
import shutil
import subprocess
from pathlib import Path

import pytest

UNITS = sorted((Path(__file__).parents[2] / "config" / "systemd").glob("*.service"))
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


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_units_stay_below_the_accepted_exposure(path):
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("NOT RUN: systemd-analyze is not installed")
    threshold = f"--threshold={ACCEPTED_EXPOSURE * 10:.0f}"
    done = subprocess.run(
        [analyze, "security", "--offline=true", "--no-pager", threshold, str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_what_the_node_needs_is_left_to_it(path):
    service = read(path)
    assert service["Type"] == "notify"
    assert int(service["WatchdogSec"]) >= 10
    assert service["DevicePolicy"] == "closed"
    assert "char-accel rw" in service["DeviceAllow"].split("\n")
    assert "PrivateDevices" not in service, "it hides /dev/accel"
    assert "MemoryDenyWriteExecute" not in service, "it breaks code that is compiled at run time"


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_a_drain_has_its_time(path):
    assert int(read(path)["TimeoutStopSec"]) >= 30
    assert read(path)["KillMode"] == "mixed", "engines must live until the node has drained"


def test_keys_come_as_a_credential():
    service = read(next(path for path in UNITS if path.stem == "npu-node"))
    assert service["LoadCredential"] == "api_keys:/etc/npu-node/api_keys"
    assert "NPU_NODE_API_KEYS_FILE=%d/api_keys" in service["Environment"]
    assert "User" in service
