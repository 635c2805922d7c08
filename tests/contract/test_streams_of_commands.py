"""The installed commands with streams that are closed, full, or of another encoding than their text."""

import os
import subprocess
import sys

import pytest

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
