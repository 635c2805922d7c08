"""`bench --jobs` and `smoke` as a person and as a program read them; the service behind them is scripted."""

import pytest

from worker_node.cli.main import main

JOB = {"p50_s": 1.25, "p95_s": 2.5, "max_s": 2.6, "limit_s": 5.0, "json_null": 0}
FIGURES = {
    "model": "qwen2.5-1.5b-instruct",
    "cold_first_s": 9.5,
    "cold_limit_s": 15.0,
    "jobs": {"title": JOB, "summary": JOB | {"limit_s": 10.0}},
    "failures": [],
    "problems": [],
}


@pytest.fixture
def answers(monkeypatch):
    def script(answer):
        monkeypatch.setattr("worker_node.cli.bounded.with_service", lambda _args, _work: answer)

    return script


@pytest.mark.parametrize(
    ("accepted", "failures", "status"),
    [(True, [], 0), (False, [], 1), (None, [], 0), (None, ["title: the counter did not move"], 1)],
)
def test_bench_exits_by_what_is_accepted_and_what_failed(answers, capsys, accepted, failures, status):
    answers(FIGURES | {"accepted": accepted, "failures": failures, "problems": failures})
    assert main(["bench", "--jobs"]) == status
    printed = capsys.readouterr()
    assert all(failure in printed.out for failure in failures)
    assert ("no evidence" in printed.err) is (accepted is None)


def test_a_no_go_that_is_no_failure_says_why_in_its_last_line(answers, capsys):
    answers(FIGURES | {"accepted": None, "problems": ["no-go: title has a p95 of 20.0 s, over 15"]})
    assert main(["bench", "--jobs"]) == 0
    assert "no failure (exit status 0)" in capsys.readouterr().err.splitlines()[-1]
