"""The installed commands with streams that are closed, full, unread, or of another encoding than their text."""

import contextlib
import logging
import os
import subprocess
import sys

import httpx
import pytest

from backend_client.gateway import cli
from tests.support.gateway import start_gateway
from tests.support.nodes import started
from worker_node.cli import output

_ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"} | {
    "NPU_NODE_URL": "none",
    "NPU_CLIENT_NODES": "http://127.0.0.1:1",
}


def outcome(command, redirections, store, **variables):
    """Status and standard error of an entry point (`node` or `client`), run by a shell with these redirections."""
    words = command.split()
    start = f"import sys, npu_commands; sys.argv = {words!r}; sys.exit(npu_commands.{words[0]}())"
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirections}', "sh", sys.executable, "-c", start],
        env=_ENVIRONMENT | {"NPU_NODE_MODEL_STORE": str(store)} | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("command", "redirections"), [("node list", "<&- >&-"), ("node ps", ">&-"), ("client generate --help", ">&-")]
)
def test_a_closed_stream_is_no_mistake(tmp_path, command, redirections):
    status, told = outcome(command, redirections, tmp_path)
    assert status == 0
    assert "Traceback" not in told


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="NOT RUN: there is no /dev/full")  # noqa: PTH110
def test_a_full_disk_of_the_output_is_not_taken_for_that_of_the_model_store(tmp_path):
    status, told = outcome("node list", "> /dev/full", tmp_path)
    assert (status, told) == (1, "npu-node: the output cannot be written: no space left on device\n")


def test_what_the_encoding_of_the_output_lacks_is_escaped():
    print_it = "import npu_commands; npu_commands._complete_streams(); print('größer \\N{GRINNING FACE}')"
    done = subprocess.run(
        [sys.executable, "-c", print_it],
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == b"gr\\xf6\\xdfer \\U0001f600\n"


@pytest.fixture
def unread_pipe():
    """A pipe that is full, since nobody reads it; both ends."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, bytes(4096))
    os.set_blocking(write, True)
    yield read, write
    os.close(read)
    os.close(write)


@pytest.mark.skipif(os.name == "nt", reason="NOT RUN: a pipe of Windows cannot be asked whether it takes a write")
def test_a_log_that_nobody_reads_does_not_stop_a_node(unread_pipe, quick_models):
    with started(["serve", "--port", "0"], _ENVIRONMENT | quick_models, stderr=unread_pipe[1]) as node:
        assert node.stdout.readline().startswith("listening on http://")


@pytest.mark.skipif(os.name == "nt", reason="NOT RUN: a pipe of Windows cannot be asked whether it takes a write")
def test_a_log_that_nobody_reads_does_not_stop_a_gateway(unread_pipe):
    # It logs that it cannot reach its node.
    with start_gateway("http://127.0.0.1:1", stderr=unread_pipe[1]) as url:
        assert httpx.get(f"{url}/health", timeout=30).json()["nodes_usable"] == 0


@pytest.mark.skipif(os.name == "nt", reason="NOT RUN: a pipe of Windows cannot be asked whether it takes a write")
@pytest.mark.parametrize("handler", [output.LogHandler, cli.LogHandler], ids=["node", "gateway"])
def test_a_log_that_is_read_again_says_how_many_lines_are_lost(unread_pipe, handler):
    read, write = unread_pipe
    with open(write, "w", closefd=False) as stream:
        handler = handler(stream)
        lines = [logging.makeLogRecord({"msg": f"line {number}"}) for number in range(4)]
        for line in lines[:3]:
            handler.emit(line)
        os.read(read, 1 << 20)
        handler.emit(lines[3])
    assert os.read(read, 1 << 20) == b"3 lines of the log are lost, since stderr took no more\nline 3\n"
