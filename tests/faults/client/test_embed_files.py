"""`npu-client embed --in --out`: every format, and every way of stopping in the middle."""

import json

import numpy as np
import pytest

from backend_client import NPUClient
from backend_client.cli import embed
from backend_client.cli.main import main
from tests.faults.scripted_node import ScriptedNode, answering, error_response, served_in_thread, vectors_for

TEXTS = [f"text {index} ä" for index in range(300)]


@pytest.fixture
def node(monkeypatch):
    monkeypatch.delenv("NPU_CLIENT_CONFIG", raising=False)
    node = ScriptedNode()
    with served_in_thread(node) as url:
        monkeypatch.setenv("NPU_CLIENT_NODES", url)
        yield node


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "texts.jsonl"
    lines = [json.dumps({"id": f"id-{index}", "text": text}) for index, text in enumerate(TEXTS)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def read(path):
    if path.suffix == ".npy":
        return np.load(path)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [(row["index"], row["id"], row["space"]) for row in rows] == [
        (index, f"id-{index}", "space-a") for index in range(300)
    ]
    return np.float32([row["embedding"] for row in rows])


@pytest.mark.parametrize("suffix", [".npy", ".jsonl"])
@pytest.mark.usefixtures("node")
def test_each_format_holds_every_vector_in_order(source, tmp_path, suffix):
    out = tmp_path / f"out{suffix}"
    assert main(["embed", "--in", str(source), "--out", str(out)]) == 0
    np.testing.assert_array_equal(read(out), vectors_for(TEXTS))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([out.name, source.name])


@pytest.fixture
def fails_late(node, monkeypatch):
    """The node answers no request with one of the texts; fragments are small enough that some are done before."""
    monkeypatch.setattr(embed, "ROWS_PER_FRAGMENT", 1)
    # A client that asks once: retries would only make these tests slower.
    monkeypatch.setenv("NPU_CLIENT_RETRY__ATTEMPTS", "1")
    node.respond = answering(
        lambda: error_response(503, "engine_unavailable") if TEXTS[250] in node.bodies[-1]["texts"] else None
    )


@pytest.mark.usefixtures("fails_late")
def test_what_is_done_is_not_done_again(node, source, tmp_path, capsys):
    out = tmp_path / "out.npy"
    assert main(["embed", "--in", str(source), "--out", str(out)]) == 1
    assert not out.exists()
    node.respond = None
    node.bodies.clear()
    assert main(["embed", "--in", str(source), "--out", str(out)]) == 0
    again = {text for body in node.bodies for text in body["texts"]}
    assert TEXTS[250] in again
    assert TEXTS[0] not in again
    np.testing.assert_array_equal(read(out), vectors_for(TEXTS))
    assert f"300 texts ({300 - len(again & set(TEXTS))} of them done before)" in capsys.readouterr().err


@pytest.mark.usefixtures("fails_late")
def test_another_vector_space_or_input_does_not_continue(node, source, tmp_path, capsys):
    out = tmp_path / "out.npy"
    assert main(["embed", "--in", str(source), "--out", str(out)]) == 1
    node.respond = None
    node.space = "space-b"
    assert main(["embed", "--in", str(source), "--out", str(out)]) == 1
    assert "vector space" in capsys.readouterr().err
    node.space = "space-a"
    source.write_text('"another"\n', encoding="utf-8")
    assert main(["embed", "--in", str(source), "--out", str(out)]) == 1
    assert "holds another job" in capsys.readouterr().err


@pytest.mark.usefixtures("node")
def test_each_line_of_a_text_file_is_a_row_empty_ones_too(tmp_path):
    (tmp_path / "in.txt").write_bytes("a\r\n\nä".encode())
    assert main(["embed", "--in", str(tmp_path / "in.txt"), "--out", str(tmp_path / "out.npy")]) == 0
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), vectors_for(["a", "", "ä"]))


async def test_embed_stream_keeps_the_order_and_little_in_memory(pair):
    given = 0

    async def texts():
        nonlocal given
        for text in TEXTS * 10:
            given += 1
            yield text

    async with NPUClient([node.url for node in pair]) as client:
        rows = []
        async for batch in client.embed_stream(texts()):
            rows.append(batch.vectors)
            assert given <= sum(map(len, rows)) + (client.backend.concurrency() + 1) * 64
    np.testing.assert_array_equal(np.concatenate(rows), vectors_for(TEXTS * 10))


async def test_embed_stream_fails_in_its_turn_and_cleans_up(scripted):
    scripted.respond = answering(
        lambda: error_response(400, "invalid_request") if TEXTS[150] in scripted.bodies[-1]["texts"] else None
    )
    async with NPUClient([scripted.url]) as client:
        stream = client.embed_stream(TEXTS)
        assert len((await anext(stream)).vectors) == 64
        assert len((await anext(stream)).vectors) == 64
        with pytest.raises(Exception, match="invalid"):
            await anext(stream)
        assert client.status()[0].in_flight == 0
