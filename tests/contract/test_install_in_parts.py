"""`make demo` installs in parts; what goes wrong with one leads to pip's own way, and Ctrl-C to the end."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "packaging" / "install_node.py"
PARTS = 5


@pytest.fixture
def python(tmp_path):
    """Makes a python whose pip prints its arguments and then does what a line of shell says."""

    def make(line):
        path = tmp_path / "python"
        path.write_text(f'#!/bin/sh\necho "$@"\n{line}\n')
        path.chmod(0o755)
        return path

    return make


def install(python):
    # pip check writes to nowhere, so it is not among the commands.
    done = subprocess.run([sys.executable, SCRIPT, python], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout.splitlines()


def test_parts_that_are_all_installed_are_the_end(python):
    status, commands = install(python("exit 0"))
    assert status == 0
    assert len(commands) == PARTS
    assert all("--no-deps" in command for command in commands)


@pytest.mark.parametrize(
    "line",
    [
        pytest.param('case "$*" in *numpy*) exit 1;; esac', id="a part fails"),
        pytest.param('case "$*" in *numpy*) kill -9 $$;; esac', id="a part is killed"),
        pytest.param('case "$*" in *" check") exit 1;; esac', id="something is missing"),
    ],
)
def test_what_goes_wrong_with_a_part_leads_to_pips_own_way(python, line):
    status, commands = install(python(f'{line}\ncase "$*" in *node,convert*) exit 7;; esac'))
    assert status == 7
    assert len(commands) == PARTS + 1
    assert commands[-1].endswith("--editable .[node,convert]")
    assert "--no-deps" not in commands[-1]


@pytest.mark.usefixtures("interruptible")
def test_an_interruption_ends_all_parts_and_begins_no_other_way(python):
    with subprocess.Popen(
        [sys.executable, SCRIPT, python("exec sleep 60")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as running:
        for _ in range(PARTS):
            running.stdout.readline()
        os.killpg(running.pid, signal.SIGINT)
        # Only when all that hold it have ended is there no more of it.
        rest, problems = running.communicate()
    assert (running.returncode, rest, problems) == (130, "", "")
