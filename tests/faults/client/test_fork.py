"""Clients that were made, and used, before the process forked."""

import subprocess
import sys

from tests.faults.scripted_node import ScriptedNode
from tests.faults.served import served_in_thread

BLOCKING = """
import os, sys, traceback
from backend_client.sync import NPUClient

client = NPUClient([sys.argv[1]])
before = client.embed("text")
child = os.fork()
if child == 0:
    code = 1
    try:
        code = 0 if client.embed("text") == before else 2
        client.close()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
assert client.embed("text") == before
client.close()
"""

AWAITED = """
import asyncio, os, sys
from backend_client import NPUClient

client = NPUClient([sys.argv[1]])
before = asyncio.run(client.embed("text"))
child = os.fork()
if child == 0:
    code = 1
    try:
        code = 0 if asyncio.run(client.embed("text")) == before else 2
    finally:
        os._exit(code)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
"""


def run_with_node(program):
    with served_in_thread(ScriptedNode()) as url:
        done = subprocess.run(
            [sys.executable, "-c", program, url], capture_output=True, text=True, check=False, timeout=60
        )
    assert done.returncode == 0, done.stderr


def test_a_blocking_client_works_in_both_processes():
    run_with_node(BLOCKING)


def test_an_awaited_client_works_in_the_child():
    run_with_node(AWAITED)
