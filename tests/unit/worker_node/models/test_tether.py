"""A tethered command lives no longer than the process that started it."""

import os
import subprocess

import psutil

from worker_node.core.operating_system import tethered

SLEEPER = "import sys; print('up', flush=True); sys.stdin.read()"


def test_it_does_what_the_command_does(python):
    done = subprocess.run(tethered([str(python), "-c", "raise SystemExit(7)"]), check=False)
    assert done.returncode == 7


def test_it_dies_when_its_parent_is_killed(python):
    script = (
        "import subprocess, sys\n"
        "from worker_node.core.operating_system import tethered\n"
        f"child = subprocess.Popen(tethered([sys.executable, '-c', {SLEEPER!r}]), stdin=subprocess.PIPE, "
        "stdout=subprocess.PIPE)\n"
        "child.stdout.readline(); print(child.pid, flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen([python, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        assert child.is_running()
        parent.kill()
    assert psutil.wait_procs([child], timeout=20)[1] == []


def test_it_does_not_start_when_its_parent_is_gone_already(python):
    command = tethered([str(python), "-c", "print('started')"])
    command[command.index(str(os.getpid()))] = "1"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "started" not in done.stdout
    assert "parent" in done.stderr
