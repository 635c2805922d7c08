"""Ctrl-C ends the demo, and a command while it is imported, with one line, whichever module it meets."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

# A SIGINT at the moment when a module is about to be imported.
PROGRAM = """
import os, signal, sys
class Interrupt:
    def find_spec(self, name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupt())
import npu_commands
sys.argv = [{command!r}, "--help"]
sys.exit(npu_commands.{entry}())
"""


@pytest.mark.parametrize(
    ("entry", "module"),
    [
        ("client", "backend_client"),
        ("client", "backend_client.errors"),
        ("client", "backend_client.cli.main"),
        ("node", "worker_node"),
        ("node", "worker_node.cli.main"),
        ("node", "worker_node.cli.serve"),
    ],
)
def test_an_interrupt_while_a_command_is_imported_is_one_line(entry, module):
    program = PROGRAM.format(module=module, entry=entry, command=f"npu-{entry}")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (130, f"npu-{entry}: interrupted\n")


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_of_the_demo_is_one_line(quick_models):
    """As a terminal does it: every process of the demo gets the signal."""
    demo = subprocess.Popen(
        [sys.executable, "-u", "examples/demo.py"],
        cwd=Path(__file__).parents[2],
        env=os.environ | quick_models,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    with demo:
        assert any("listens on" in line for line in demo.stdout)
        os.killpg(demo.pid, signal.SIGINT)
        said = demo.stdout.read()
    assert (demo.returncode, said.splitlines()[-1]) == (130, "demo: interrupted")
    assert "Traceback" not in said
