"""A fragment that ends the process which works on it is quarantined, in one process as on Ray; all others are done."""

import asyncio
import signal

import pytest

from backend_client.bulk import BulkRequest, status, supervisor
from tests.faults.bulk.data_sets import ROWS_PER_GROUP, assert_whole, rows_of

QUARANTINED, INCOMPLETE, INTERRUPTED = 3, 5, 130
ALWAYS = 100


def test_it_is_quarantined_after_its_attempts_and_the_others_are_done(starter, tmp_path):
    started, source, texts = starter
    out = tmp_path / "out"
    assert started.run(source, out, deadly=(ROWS_PER_GROUP, "SIGKILL", ALWAYS)) == QUARANTINED
    assert set(texts) - set(rows_of(out)) == set(texts[ROWS_PER_GROUP : 2 * ROWS_PER_GROUP])
    # Once beside another fragment, where nothing can be blamed, then three times alone.
    assert len((tmp_path / "out.deaths").read_text()) == 4
    assert not (out / "_SUCCESS").exists()
    assert status_of(source, out).exit_code == INCOMPLETE
    assert started.run(source, out) == 0
    assert_whole(out, texts)
    assert status_of(source, out).exit_code == 0


def status_of(source, out):
    """How far the job is, with the share of rejected rows that the drivers allow."""
    request = BulkRequest(kind="embed", source=str(source), out=str(out), column="text", max_rejected=0.1)
    return asyncio.run(status(request))


def test_a_fragment_that_is_harmless_alone_is_done(starter, tmp_path):
    started, source, texts = starter
    out = tmp_path / "out"
    assert started.run(source, out, deadly=(0, "SIGABRT", 2)) == 0
    assert_whole(out, texts)


@pytest.mark.parametrize("sign", ["SIGINT", "SIGTERM"])
def test_a_signal_to_the_driver_ends_its_child_and_is_not_a_death(starter, tmp_path, sign):
    started, source, texts = starter
    out = tmp_path / "out"
    assert started.run(source, out, sign=sign, to_driver=True) == INTERRUPTED
    assert status_of(source, out).exit_code == INCOMPLETE
    assert started.run(source, out) == 0
    assert_whole(out, texts)


def test_a_process_that_dies_again_and_again_without_getting_anything_done_is_given_up(monkeypatch, capfd):
    monkeypatch.setattr(supervisor, "_MOST_IN_A_ROW", 3)
    begun = []

    def once(work, deaths):
        begun.append(len(deaths))
        return supervisor._End(-signal.SIGBUS, frozenset({f"f{len(begun)}", "g"}))

    monkeypatch.setattr(supervisor, "_once", once)
    assert supervisor.supervise(lambda deaths, note: 0) == 1
    assert begun == [0, 1, 2]
    assert "SIGBUS, 3 times in a row" in capfd.readouterr().err
