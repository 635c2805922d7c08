"""`npu-node pull --embedded` prepares both models at the same time, each in a process of its own."""

import asyncio
import os

import pytest
import uvloop

from worker_node.cli import main
from worker_node.commands import pull as pull_command
from worker_node.core.errors import DownloadFailed
from worker_node.models import pull as pulling
from worker_node.models.progress import Silent
from worker_node.models.store import ModelStore


@pytest.fixture(autouse=True)
def _memory_enough(monkeypatch):
    monkeypatch.setattr(pull_command, "available_memory", lambda: 10**10)


def test_both_are_pulled_at_once_and_one_failure_ends_the_other(monkeypatch, tmp_path, capsys):
    begun, ended = [], []

    async def pull(root, name, progress):
        begun.append(name)
        progress.stage("downloading", 1)
        try:
            while len(begun) < 2:
                await asyncio.sleep(0)
            if name.startswith("smollm2"):
                raise DownloadFailed("the index is away")
            await asyncio.Event().wait()
        finally:
            # The end of its process, which takes a while: a second cancellation would not wait for it.
            await asyncio.sleep(0)
            ended.append((root, name))

    monkeypatch.setattr(pulling, "pull", pull)
    with pytest.raises(SystemExit) as stopped:
        raise SystemExit(main(["pull", "--embedded", "--model-store", str(tmp_path)]))
    assert stopped.value.code not in {0, None}
    assert sorted(begun) == ["all-minilm-l6-v2", "smollm2-135m-instruct"]
    assert sorted(ended) == [(tmp_path, name) for name in sorted(begun)]
    told = capsys.readouterr().err
    assert "the index is away" in told
    assert "Traceback" not in told


def test_an_interruption_waits_for_the_end_of_both(monkeypatch, tmp_path):
    begun, ended = [], []

    async def pull(root, name, progress):
        begun.append(name)
        try:
            if len(begun) == 2:
                (waiting,) = [task for task in asyncio.all_tasks() if task.get_coro().__name__ != "pull"]
                waiting.cancel()
            await asyncio.Event().wait()
        finally:
            for _ in range(5):
                await asyncio.sleep(0)
            ended.append(name)

    monkeypatch.setattr(pulling, "pull", pull)
    with pytest.raises(asyncio.CancelledError):
        main(["pull", "--embedded", "--model-store", str(tmp_path)])
    assert sorted(ended) == sorted(begun)


@pytest.mark.parametrize(
    ("arguments", "memory"),
    [(["--embedded", "--quantization", "int8_sym"], None), (["smollm2"], None), (["--embedded"], 10**9)],
)
def test_one_after_the_other_in_another_form_alone_or_with_little_memory(
    monkeypatch, tmp_path, capsys, arguments, memory
):
    monkeypatch.setattr(pull_command, "available_memory", lambda: memory)

    def stop(store, wish, progress):
        raise DownloadFailed(f"{wish.model_id} is asked for")

    monkeypatch.setattr(pulling, "pull", lambda *arguments: pytest.fail("in a process of its own"))
    monkeypatch.setattr(ModelStore, "pull", stop)
    assert main(["pull", *arguments, "--model-store", str(tmp_path)]) == 1
    assert "smollm2-135m-instruct" in capsys.readouterr().err


# The commands run on asyncio's loop, nodes on uvloop's, which takes fewer options.
@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["command", "node"])
def test_an_interruption_of_the_terminal_does_not_reach_the_process_of_a_pull(monkeypatch, tmp_path, run):
    groups = []

    class Told(Silent):
        def stage(self, name, total=None):
            groups.append(int(name))

    script = tmp_path / "python"
    script.write_text(
        "#!/bin/sh\n"
        """printf '{"type":"stage","name":"%s","total":null}\\n' "$(cut -d ' ' -f 5 /proc/self/stat)"\n"""
        """echo '{"type":"ended","problem":null}'\n"""
    )
    script.chmod(0o755)
    monkeypatch.setattr(pulling.sys, "executable", str(script))
    run(pulling.pull(tmp_path, "any", Told()))
    (group,) = groups
    assert group != os.getpgrp()


def test_an_error_of_the_operating_system_in_a_pull_is_its_problem(monkeypatch, tmp_path, capfdbinary):
    def pull(store, name, progress):
        raise PermissionError(13, "Permission denied", "/locked")

    monkeypatch.setattr(pulling, "end_with_parent", lambda parent: None)
    monkeypatch.setattr(ModelStore, "pull", pull)
    pulling.main(1, tmp_path, "smollm2")
    assert b"may not use /locked" in capfdbinary.readouterr().out
