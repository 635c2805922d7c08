"""`npu-node pull --embedded` prepares both models at the same time, each in a process of its own."""

import asyncio

import pytest

from worker_node.cli import main
from worker_node.errors import DownloadFailed
from worker_node.models import pulling
from worker_node.models.store import ModelStore


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


def test_an_error_of_the_operating_system_in_a_pull_is_its_problem(monkeypatch, tmp_path, capfdbinary):
    def pull(store, name, progress):
        raise PermissionError(13, "Permission denied", "/locked")

    monkeypatch.setattr(pulling, "end_with_parent", lambda parent: None)
    monkeypatch.setattr(ModelStore, "pull", pull)
    pulling.main(1, tmp_path, "smollm2")
    assert b"may not use /locked" in capfdbinary.readouterr().out
