"""`bench --jobs` and `smoke` as a person and as a program read them; the service behind them is scripted."""

import pytest

from worker_node.bounded.proof import JobsReport, SmokeRecord
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
FACTS = {"verdict": "pass", "driver": None, "npu_busy_delta_us": 812, "warnings": ["the delta is not exclusive: 4711"]}


@pytest.fixture
def answers(monkeypatch):
    """Set what the commands get from the service."""

    def script(answer):
        monkeypatch.setattr("worker_node.cli.bounded.with_service", lambda _args, _work: answer)

    return script


@pytest.mark.parametrize(
    ("accepted", "failures", "status"),
    [(True, [], 0), (False, [], 1), (None, [], 0), (None, ["title: the counter did not move"], 1)],
)
def test_bench_exits_by_what_is_accepted_and_what_failed(answers, capsys, accepted, failures, status):
    answers(JobsReport(accepted, FIGURES | {"failures": failures, "problems": failures}))
    assert main(["bench", "--jobs"]) == status
    printed = capsys.readouterr()
    assert all(failure in printed.out for failure in failures)
    assert ("no evidence" in printed.err) is (accepted is None)


def test_bench_of_nothing_is_wrong_usage(capsys):
    for arguments in (["bench"], ["bench", "--jobs", "--repeat", "0"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
    assert "--repeat is at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(("passed", "status"), [(True, 0), (False, 1)])
def test_smoke_for_people_is_a_fact_a_line_and_warnings_apart(answers, capsys, passed, status):
    answers(SmokeRecord(passed, FACTS))
    assert main(["smoke"]) == status
    printed = capsys.readouterr()
    assert [line.split() for line in printed.out.splitlines()] == [
        ["verdict", "pass"],
        ["driver", "unknown"],
        ["npu_busy_delta_us", "812"],
    ]
    assert printed.err == "npu-node: warning: the delta is not exclusive: 4711\n"
