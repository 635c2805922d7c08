"""A job that is finished needs its output for reading only."""

import pytest

from backend_client.cli.main import main
from backend_client.testing import FakeFleet
from tests.faults.bulk.data_sets import assert_whole, make_input

ARGUMENTS = ["--in-process", "--rows-per-fragment", "100", "--max-rejected", "0.1"]


@pytest.fixture
def out(tmp_path):
    """An output directory that can be removed at the end, whatever became of it."""
    made = tmp_path / "out"
    yield made
    _set_mode(made, 0o755)


def _set_mode(out, mode):
    for path in (*out.rglob("*/"), out):
        path.chmod(mode)


def test_it_is_finished_on_a_read_only_output_too(starter, out):
    started, source, texts = starter
    assert started.run(source, out) == 0
    _set_mode(out, 0o555)
    assert started.run(source, out, root=False) == 0
    assert_whole(out, texts)


def test_one_that_is_not_finished_fails_on_a_read_only_output(starter, out):
    started, source, texts = starter
    assert started.run(source, out) == 0
    for missing in (out / "_SUCCESS", next(out.glob("part-*"))):
        content = missing.read_bytes()
        missing.unlink()
        _set_mode(out, 0o555)
        assert started.run(source, out, root=False) == 1
        _set_mode(out, 0o755)
        missing.write_bytes(content)
    assert_whole(out, texts)


def test_it_says_that_nothing_was_left_to_do(tmp_path, capsys, monkeypatch):
    source, out = tmp_path / "in", tmp_path / "out"
    make_input(source)
    with FakeFleet(1) as fleet:
        for name, value in fleet.environment().items():
            monkeypatch.setenv(name, value)
        assert main(["embed-dataset", str(source), str(out), *ARGUMENTS]) == 0
        first = capsys.readouterr()
        served = len(fleet.sent("/embeddings"))
        assert main(["embed-dataset", str(source), str(out), *ARGUMENTS]) == 0
        again = capsys.readouterr()
        assert len(fleet.sent("/embeddings")) == served
    assert "npu-client: the job was finished before: nothing was left to do\n" in again.err
    assert "finished before" not in first.err
