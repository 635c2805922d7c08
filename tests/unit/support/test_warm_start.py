"""A command in a forked process behaves as one in an interpreter of its own."""

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.warm_start import run_warm, start_warm_piped


@pytest.mark.parametrize("arguments", [["serve", "--config", "missing.toml"], ["nonsense"]], ids=lambda a: a[0])
def test_arguments_environment_directory_streams_and_status_are_as_in_a_cold_one(tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    env = os.environ | {"NPU_NODE_MODEL_STORE": str(tmp_path / "störe"), "NPU_NODE_PORT": "none"}
    command = [sys.executable, "-m", "worker_node", *arguments]
    cold = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    warm = run_warm(arguments, env=env)
    assert (warm.returncode, warm.stdout, warm.stderr) == (cold.returncode, cold.stdout, cold.stderr)


def test_signals_reach_it_and_its_end_is_noticed(tmp_path):
    environment = {"NPU_NODE_MODEL_STORE": str(tmp_path), "NPU_NODE_MODELS": "[]"}
    for number, status in ((signal.SIGTERM, 0), (signal.SIGKILL, -signal.SIGKILL)):
        process = start_warm_piped(["serve", "--port", "0", "--log-level", "error"], env=os.environ | environment)
        with process.stdout:
            assert process.stdout.readline().startswith("listening on http://127.0.0.1:")
            assert process.poll() is None
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.01)
            process.send_signal(number)
            assert process.wait(30) == status
            assert process.stdout.read() == ""
        process.kill()


@pytest.mark.slow  # each imports the node in a process of its own
@pytest.mark.parametrize("kill", [os.kill, os.killpg], ids=["SIGKILL of the worker", "SIGHUP of its terminal"])
def test_none_outlives_an_interrupted_run(tmp_path, kill):
    """SIGHUP reaches nodes too, and is no reason for them to end."""
    script = (
        "import os, signal\nfrom tests.support.warm_start import start_warm_piped\n"
        # What is run by nohup ignores it.
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        "node = start_warm_piped(['serve', '--port', '0', '--log-level', 'error'], env=dict(os.environ))\n"
        "print(node.stdout.readline().split()[0], node.pid, flush=True)\ninput()\n"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[3],
        env=os.environ | {"NPU_NODE_MODEL_STORE": str(tmp_path), "NPU_NODE_MODELS": "[]"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with run:
        said, node = run.stdout.readline().split()
        assert said == "listening"
        ended = os.pidfd_open(int(node))
        try:
            kill(run.pid, signal.SIGKILL if kill is os.kill else signal.SIGHUP)
            assert select.select([ended], [], [], 30)[0], f"node {node} outlived the run"
        finally:
            run.kill()
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(ended, signal.SIGKILL)
            os.close(ended)
