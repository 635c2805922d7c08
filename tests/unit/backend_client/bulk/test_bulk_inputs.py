"""Which files an input names, which it refuses, and the fragments they are cut into, the same on every machine."""

import gzip

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from backend_client.bulk.inputs import (
    Fragment,
    InputFile,
    check_apart,
    check_unchanged,
    list_inputs,
)
from backend_client.bulk.job import load_job
from backend_client.errors import ConfigurationError
from tests.unit.backend_client.bulk.bulk_rows import surveyed


@pytest.mark.parametrize(
    ("files", "pattern", "message"),
    [
        (["in.md"], "in.md", "no known form"),
        (["in.parquet.gz"], "in.parquet.gz", "no known form"),
        (["a.parquet", "b.csv.gz"], "", r"b.csv.gz is CSV.*convert it to Parquet"),
        (["a.parquet", "b.csv.gz"], "b.*", r"b.csv.gz is CSV.*convert it to Parquet"),
        ([], "*.parquet", "no input file"),
    ],
)
def test_an_input_that_is_not_read_is_refused(tmp_path, files, pattern, message):
    for name in files:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ConfigurationError, match=message):
        list_inputs(str(tmp_path / pattern))


def test_an_unknown_scheme_is_refused():
    with pytest.raises(ConfigurationError, match="cannot be opened"):
        list_inputs("nonsense://bucket/x")


def test_links_are_read_as_what_they_lead_to_and_nothing_is_there_twice(tmp_path):
    """The Hugging Face cache and Kubernetes' volumes hold files behind links."""
    source, elsewhere = tmp_path / "in", tmp_path / "elsewhere"
    (source / "..2026" / "deep").mkdir(parents=True)
    elsewhere.mkdir()
    for path in (source / "a.jsonl", source / "..2026" / "m.jsonl", elsewhere / "z.jsonl", tmp_path / "blob"):
        path.write_text('{"text": "x"}\n' * (1 + len(path.name)))
    links = {"b.jsonl": "../blob", "m.jsonl": "..2026/m.jsonl", "dir": "../elsewhere", "loop": ".", "up": ".."}
    for name, target in links.items():
        (source / name).symlink_to(target)
    found = list_inputs(str(source))
    names = ["a.jsonl", "b.jsonl", "dir/z.jsonl", "m.jsonl"]
    assert [file.url.removeprefix(f"file://{source}/") for file in found] == names
    assert [file.size for file in found] == [(source / name).stat().st_size for name in names]
    for file in found:
        check_unchanged(file)
    assert len(list_inputs(f"{source}/*.jsonl")) == 3
    (source / "gone.jsonl").symlink_to("nowhere")
    for pattern in (source, f"{source}/*.jsonl"):
        with pytest.raises(ConfigurationError, match="is a link to a file that is not there"):
            list_inputs(str(pattern))


@pytest.mark.parametrize(
    ("pattern", "out", "apart"),
    [
        ("in", "out", True),
        ("in", "in", False),
        ("in", "in/out", False),
        ("in", "in/_out", True),
        ("in", "in2", True),
        ("in", ".", True),
        ("in/*.parquet", "in", False),
        ("in/**/*.jsonl", "in/out", False),
        ("in", "in/../in", False),
        ("in", "link", False),
        ("link", "in/out", False),
    ],
)
def test_an_output_that_the_input_would_list_is_refused(tmp_path, monkeypatch, pattern, out, apart):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    (tmp_path / "link").symlink_to("in")
    if apart:
        check_apart(pattern, out)
    else:
        with pytest.raises(ConfigurationError, match="choose an output outside of it"):
            check_apart(pattern, out)


@pytest.mark.parametrize("name", ["in[a].jsonl", "what?.jsonl", "all*.jsonl", "[a]/in.jsonl"])
def test_a_path_that_exists_is_that_path_whatever_signs_it_has(tmp_path, name):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text('{"text": "x"}\n')
    for other in ("ina.jsonl", "whatx.jsonl", "all of it.jsonl"):
        (tmp_path / other).write_text('{"text": "other"}\n')
    (file,) = list_inputs(str(path))
    assert file.url == f"file://{path}"
    check_unchanged(file)
    check_apart(str(path), str(tmp_path / "out"))


def test_a_stored_job_is_the_same_job_with_the_same_fragments(tmp_path):
    pq.write_table(pa.table({"text": ["a"] * 100}), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "b"}'))
    (tmp_path / "c.parquet").write_bytes(b"PAR1 no")
    job, fragments = surveyed(tmp_path, 30, keep=("text",))
    assert load_job(job.dump(fragments), "") == (job, fragments)
    assert [bool(fragment.problem) for fragment in fragments] == [False] * 5 + [True]


def test_the_id_tells_versions_of_a_file_apart():
    files = [InputFile("a", 1, "1", "jsonl"), InputFile("a", 1, "2", "jsonl"), InputFile("a", 2, "1", "jsonl")]
    assert len({Fragment(file, 0, 1, 1).id for file in files}) == 3
