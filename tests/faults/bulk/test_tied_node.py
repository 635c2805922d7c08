"""A node that an actor started ends with the actor, however that ends."""

import contextlib
import os
import signal
import subprocess
import sys

import psutil
import pytest

NODE = """
import os, sys, time
open("node.pid", "w").write(str(os.getpid()))
print("listening on http://127.0.0.1:1", flush=True)
time.sleep(600)
"""
ACTOR = """
import sys, time
from backend_client.bulk.tied_node import TiedNode
node = TiedNode.start()
print(node.url, flush=True)
if sys.argv[1] == "stop":
    node.stop()
time.sleep(600)
"""


@pytest.mark.parametrize("end", ["kill", "exit", "stop"])
def test_the_node_ends_with_the_process_that_started_it(tmp_path, end):
    package = tmp_path / "worker_node"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(NODE)
    actor = subprocess.Popen(
        [sys.executable, "-c", ACTOR, end], cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=os.environ
    )
    try:
        assert actor.stdout.readline() == "http://127.0.0.1:1\n"
        pid = int((tmp_path / "node.pid").read_text())
        if end == "kill":
            actor.kill()
        elif end == "exit":
            actor.send_signal(signal.SIGTERM)
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).wait(20)
    finally:
        actor.kill()
        actor.wait()
        actor.stdout.close()
