"""What is kept is made once, appears complete, and is made anew when its recipe changes; how files share machines."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.ops import keeping
from tests.ops.side_by_side import MACHINES, unit_of

TESTS = Path(__file__).parent


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(keeping, "CACHE", tmp_path / "cache")
    return tmp_path / "cache"


def test_it_is_made_once_for_a_recipe(cache):
    made = []

    def make(part):
        made.append(part)
        part.write_text("content")

    first = keeping.kept("image.tar", make, "recipe")
    assert first.read_text() == "content"
    assert first.suffix == ".tar"
    assert keeping.kept("image.tar", make, "recipe") == first
    assert len(made) == 1
    assert keeping.kept("image.tar", make, "another recipe") != first
    assert len(made) == 2


def test_what_could_not_be_made_is_not_there_and_is_made_anew(cache):
    def fail(part):
        part.mkdir()
        (part / "half").touch()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        keeping.kept("wheels", fail)

    made = keeping.kept("wheels", Path.mkdir)
    assert list(made.iterdir()) == []


def test_what_is_downloaded_is_tried_again_from_the_beginning(cache):
    tried = []

    def download(part):
        part.mkdir()
        tried.append(part)
        if len(tried) < keeping.ATTEMPTS:
            (part / "half").touch()
            raise subprocess.TimeoutExpired("pip", 900)

    made = keeping.kept("wheels", download, attempts=keeping.ATTEMPTS)
    assert len(tried) == keeping.ATTEMPTS
    assert list(made.iterdir()) == []
    tried.clear()
    with pytest.raises(subprocess.TimeoutExpired):
        keeping.kept("others", download, attempts=keeping.ATTEMPTS - 1)


def test_processes_that_want_the_same_wait_for_the_one_that_makes_it(cache):
    script = """
import pathlib, sys
from tests.ops import keeping
keeping.CACHE = pathlib.Path(sys.argv[1])
def make(part):
    with (pathlib.Path(sys.argv[1]).parent / "made").open("a") as log:
        log.write("made\\n")
    part.write_text("content")
print(keeping.kept("key", make).read_text())
"""
    running = [
        subprocess.Popen([sys.executable, "-c", script, str(cache)], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    assert [process.communicate(timeout=100)[0] for process in running] == ["content\n"] * 4
    assert (cache.parent / "made").read_text() == "made\n"


def test_the_users_of_a_machine_run_on_one_worker():
    units = {path.name: unit_of(str(path)) for path in TESTS.rglob("test_*.py")}
    fleet, hardware, release = ({name for name, unit in units.items() if unit == machine} for machine in MACHINES)
    assert {"test_provisioning.py", "test_upgrade.py", "test_bounded_user_unit.py"} <= fleet
    assert {"test_driver_role.py", "test_passthrough_role.py"} <= hardware
    assert release == {"test_chart_data_sets.py", "test_chart_nodes.py", "test_chart_values.py"}
    assert "test_prometheus_rules.py" not in fleet | hardware
