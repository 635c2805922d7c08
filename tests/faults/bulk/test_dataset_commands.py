"""`npu-client embed-dataset` and `generate-dataset`: what they print, how they end, and wrong usage."""

import errno
import json

import pyarrow.parquet as pq
import pytest

from backend_client.bulk.stores import LocalStore
from backend_client.cli.main import main
from backend_client.testing import status
from backend_client.testing.node import WRITER
from tests.faults.bulk.data_sets import make_input

ARGUMENTS = ["--rows-per-fragment", "100", "--max-rejected", "0.1"]


@pytest.fixture
def source(tmp_path):
    make_input(tmp_path / "in")
    return str(tmp_path / "in")


def read_only(monkeypatch):
    def fail(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("create", "temporary", "commit", "remove", "sweep"):
        monkeypatch.setattr(LocalStore, name, fail)


def test_a_job_reports_in_json_and_is_finished_once(fleet, source, tmp_path, capsys, monkeypatch):
    out = str(tmp_path / "out")
    assert main(["embed-dataset", source, out, "--status"]) == 1
    assert "holds no job" in capsys.readouterr().err
    assert main(["embed-dataset", source, out, *ARGUMENTS, "--json"]) == 0
    *progress, report = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {event["event"] for event in progress} == {"progress"}
    assert (report["event"], report["exit_code"], report["success"]) == ("report", 0, True)
    assert (report["rows"], report["rejected"], report["done"]) == (1000, 3, report["fragments"])
    assert main(["embed-dataset", source, out, *ARGUMENTS, "--status"]) == 0
    assert capsys.readouterr().out == f"{report['done']} of {report['done']} fragments, 1000 rows, 3 rejected\n"
    served = len(fleet.sent("/embeddings"))
    read_only(monkeypatch)
    assert main(["embed-dataset", source, out, *ARGUMENTS]) == 0
    assert "the job was finished before: nothing was left to do" in capsys.readouterr().err
    assert len(fleet.sent("/embeddings")) == served
    for missing in (tmp_path / "out" / "_SUCCESS", next((tmp_path / "out").glob("part-*"))):
        missing.unlink()
        assert main(["embed-dataset", source, out, *ARGUMENTS]) == 1
        assert "cannot be written" in capsys.readouterr().err


@pytest.mark.usefixtures("fleet")
@pytest.mark.parametrize("name", ["part-0.parquet", "_SUCCESS"])
def test_a_new_job_is_not_begun_among_data_of_another(source, tmp_path, capsys, name):
    out = tmp_path / "out"
    out.mkdir()
    (out / "README.md").touch()
    (out / name).write_text("of another job")
    assert main(["embed-dataset", source, str(out), *ARGUMENTS]) == 1
    assert f"{out} has no _job.json, but holds {name}" in capsys.readouterr().err
    (out / name).unlink()
    assert main(["embed-dataset", source, str(out), *ARGUMENTS]) == 0


@pytest.mark.usefixtures("fleet")
@pytest.mark.parametrize(
    ("command", "more", "message"),
    [
        ("embed", ["--shard", "3"], "--shard is I/N"),
        ("embed", ["--shard", "3/3"], "shard 3/3 does not exist"),
        ("embed", ["--window", "0"], "window must be more than 0"),
        ("embed", ["--max-rejected", "7"], "must be a share of the rows"),
        ("embed", ["--keep-columns", "text,device"], "adds a column device"),
        ("embed", ["--keep-columns", ""], "--keep-columns names columns"),
        ("embed", ["--patience", "nan"], "patience must be a number of seconds"),
        ("embed", ["--timeout", "inf"], "timeout must be at most 999999 seconds, got inf"),
        ("generate", ["--max-tokens", "-1"], "max_tokens must be at least 1, got -1"),
        ("generate", ["--temperature", "nan"], "temperature must be from 0 to 2, got nan"),
    ],
)
def test_wrong_flags_are_refused_before_any_work(source, tmp_path, capsys, command, more, message):
    try:
        status = main([f"{command}-dataset", source, str(tmp_path / "out"), *more])
    except SystemExit as left:
        status = left.code
    assert status == 2
    assert capsys.readouterr().err.count(message) == 1
    assert not (tmp_path / "out").exists()


def test_prompts_and_conversations_are_answered(fleet, tmp_path):
    fleet[0].answer = fleet[1].answer = lambda body: json.dumps({"asked": body.get("prompt") or body["messages"]})
    lines = [{"prompt": f"p{number}", "messages": [{"role": "user", "content": f"m{number}"}]} for number in range(20)]
    lines.append({"prompt": "good", "messages": []})
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for column, count in (("prompt", 21), ("messages", 20)):
        out = tmp_path / column
        command = ["generate-dataset", str(tmp_path / "in.jsonl"), str(out), f"--{column}-column", column]
        assert main([*command, "--max-tokens", "9", "--max-rejected", "0.5"]) == 0
        (path,) = out.glob("part-*")
        rows = pq.read_table(path).to_pylist()
        assert len(rows) == count
        for row in rows:
            asked = row["prompt"] if column == "prompt" else json.loads(row["messages"])
            assert json.loads(row["generated_text"])["asked"] == asked
            assert (row["node"] in fleet.urls, row["model"]) == (True, WRITER)
    fleet.assert_sent("/inference", max_new_tokens=9)
    fleet.assert_sent("/v1/chat/completions", max_tokens=9)


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
}
ANSWERS = {
    "good": '{"name": "Ada", "age": 36}',
    "no JSON": "Ada is 36.",
    "cut": '{"name": "Ada", "age": 3',
    "incomplete": '{"name": "Ada"}',
    "another type": '{"name": "Ada", "age": "36"}',
    "beyond its bounds": '{"name": "Ada", "age": -1}',
    "not an object": "36",
    "no number": '{"name": "Ada", "age": NaN}',
}


def test_an_answer_that_breaks_the_schema_is_set_aside(fleet, tmp_path):
    # The first request of a job asks for the model.
    fleet[0].answer = fleet[1].answer = lambda body: (
        ANSWERS[body["messages"][0]["content"]] if "messages" in body else ""
    )
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": name}) + "\n" for name in ANSWERS))
    (tmp_path / "schema.json").write_text(json.dumps(PERSON))
    command = ["generate-dataset", str(tmp_path / "in.jsonl"), str(tmp_path / "out")]
    assert main([*command, "--response-schema", str(tmp_path / "schema.json"), "--max-rejected", "0.9"]) == 0
    (path,) = (tmp_path / "out").glob("part-*")
    assert pq.read_table(path)["generated_text"].to_pylist() == [ANSWERS["good"]]
    (rejected,) = (tmp_path / "out" / "_rejected").iterdir()
    reasons = [json.loads(line)["reason"] for line in rejected.read_text().splitlines()]
    assert reasons == ["the answer does not match the schema"] * (len(ANSWERS) - 1)
    assert fleet.assert_sent("/v1/chat/completions").body["response_format"]["type"] == "json_schema"


@pytest.mark.parametrize(
    "schema", [{"type": "person"}, {"$ref": "http://127.0.0.1:1/person.json"}, {"$ref": "#/nope"}, 5]
)
def test_a_schema_that_is_none_ends_the_job_before_it_starts(fleet, source, tmp_path, capsys, schema):
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    command = ["generate-dataset", source, str(tmp_path / "out"), "--prompt-column", "text"]
    assert main([*command, "--response-schema", str(tmp_path / "schema.json")]) == 2
    assert "response_schema is not a valid JSON Schema" in capsys.readouterr().err
    fleet.assert_nothing_sent()


def test_a_node_that_refuses_the_key_ends_the_job_at_once(fleet, source, tmp_path, capsys):
    for node in fleet:
        node.script(*[status(401, "invalid_api_key")] * 50)
    assert main(["embed-dataset", source, str(tmp_path / "out"), *ARGUMENTS]) == 1
    assert "API key" in capsys.readouterr().err


def test_a_model_that_no_node_has_ends_the_job_at_its_start(fleet, source, tmp_path, capsys):
    """A job waits ten minutes for its nodes by default, far beyond the time limit of a test."""
    out = str(tmp_path / "out")
    assert main(["embed-dataset", source, out, *ARGUMENTS, "--model", "misspelt"]) == 1
    assert "no node serves the model misspelt" in capsys.readouterr().err
    assert main(["embed-dataset", source, out, *ARGUMENTS]) == 0
    (tmp_path / "out" / "_SUCCESS").unlink()
    next((tmp_path / "out").glob("part-*")).unlink()
    for node in fleet:
        node.offers.remove("embedding")
    assert main(["embed-dataset", source, out, *ARGUMENTS]) == 1
    assert "no node serves the model fake-embedder" in capsys.readouterr().err
