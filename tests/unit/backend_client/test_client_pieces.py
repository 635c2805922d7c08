"""The small pure parts: events, batches, vectors, ledger, settings, errors."""

import itertools
import json
import re
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend_client import ClientSettings
from backend_client.cloud import Ledger
from backend_client.embed_many import cut
from backend_client.errors import ConfigurationError, InvalidArgument, RequestRejected, SpendCapReached
from backend_client.http.answers import check_generation, transcription_in
from backend_client.http.errors import event_error, status_error
from backend_client.http.messages import NotAnAnswer, Reply, binary_vectors
from backend_client.http.stream_forms import Event, EventParser
from backend_client.options import BatchOptions
from backend_client.results import Usage
from backend_client.settings import Price

SHIPPED = Path(__file__).parents[3] / "config" / "client.toml"
STREAM = (
    ': hello\n\nevent: token\ndata: {"text": "ä"}\r\n\r\ndata: a\ndata: b\n\nid: 1\n\nevent: done\ndata:x\n\n'
).encode()
EVENTS = [Event("token", '{"text": "ä"}'), Event("message", "a\nb"), Event("done", "x")]


@given(st.lists(st.integers(0, len(STREAM)), max_size=10))
def test_events_are_the_same_however_the_bytes_are_cut(cuts):
    parser = EventParser()
    bounds = [0, *sorted(cuts), len(STREAM)]
    parts = [STREAM[start:stop] for start, stop in itertools.pairwise(bounds)]
    assert [event for part in parts for event in parser.feed(part)] == EVENTS


@pytest.mark.parametrize("garbage", [b"x" * 2000, b"data: y\n" * 300, b"data: \xff\n\n"])
def test_what_is_no_event_stream_is_told(garbage):
    parser = EventParser(max_bytes=1000)
    with pytest.raises(NotAnAnswer):
        list(parser.feed(garbage))


@given(st.lists(st.text(max_size=40), max_size=60), st.integers(1, 9), st.integers(1, 40))
def test_batches_hold_every_text_once_within_the_limits(texts, most, tokens):
    options = BatchOptions(texts=most, tokens=tokens, bytes_per_token=2.0)
    bounds = cut(texts, options)
    assert [index for start, stop in bounds for index in range(start, stop)] == list(range(len(texts)))
    for start, stop in bounds:
        assert 1 <= stop - start <= most
        size = sum(len(text.encode(errors="replace")) for text in texts[start:stop]) / 2.0
        assert size <= tokens or stop - start == 1


@given(
    st.lists(
        st.tuples(st.integers(-50, 50), st.integers(-50, 50), st.none() | st.tuples(*[st.integers(-50, 50)] * 2)),
        max_size=20,
    )
)
def test_no_call_raises_what_the_cap_leaves(calls):
    cap = Decimal("0.000500")
    ledger = Ledger({"m": Price(input=Decimal(1), output=Decimal(2))}, cap)
    ledger.reserve("m", Usage(100))
    for prompt, completion, used in calls:
        before = ledger.left
        try:
            reservation = ledger.reserve("m", Usage(prompt, completion))
        except (InvalidArgument, SpendCapReached):
            assert ledger.left == before
            continue
        ledger.settle(reservation, None if used is None else Usage(*used))
        assert 0 <= ledger.left <= before
        # What is settled twice by mistake gives nothing back.
        ledger.release(reservation)
        assert 0 <= ledger.left <= before
    assert ledger.cloud.cost >= 0


def reply(shape, body):
    return Reply(200, {"x-shape": shape, "x-space": "s"}, body)


@given(
    st.lists(
        st.lists(st.floats(-1e9, 1e9, width=32), min_size=3, max_size=3).filter(lambda row: max(map(abs, row)) > 1e-9),
        max_size=5,
    )
)
def test_vectors_arrive_as_they_were_sent(rows):
    vectors = np.array(rows, "<f4").reshape(len(rows), 3)
    found = binary_vectors(reply(f"{len(rows)},3", vectors.tobytes()), len(rows))
    np.testing.assert_array_equal(found, vectors)
    assert found.flags.writeable


@pytest.mark.parametrize(
    ("shape", "body"),
    [
        ("1,2", b"\0" * 4),
        ("2,2", b"\0" * 16),
        ("-1,2", b""),
        ("x", b""),
        ("1", b""),
        ("1,2", np.float32([1, np.nan]).tobytes()),
        ("1,2", np.float32([1, np.inf]).tobytes()),
        ("99999999999999999999,1", b""),
        ("1,0", b""),
        ("1,3", np.float32([0, 0, 0]).tobytes()),
        ("1,3", np.float32([-0.0, 0, -0.0]).tobytes()),
        ("1,2", np.float32([3e38, 3e38]).tobytes()),
    ],
)
def test_vectors_that_are_none_are_refused(shape, body):
    with pytest.raises(NotAnAnswer):
        binary_vectors(reply(shape, body), 1)


ANSWER = {
    "model": "m",
    "device": "CPU",
    "finish_reason": "stop",
    "usage": {"prompt_tokens": 3, "completion_tokens": 0},
    "timing_ms": {"queue": 1, "total": None, "new": "x"},
    "npu_busy_delta_us": None,
}


def test_an_answer_may_say_more():
    check_generation(ANSWER | {"new": 1})
    check_generation(ANSWER | {"timing_ms": None})


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"usage": {"prompt_tokens": float("inf"), "completion_tokens": 1}}, "usage.prompt_tokens"),
        ({"usage": {"prompt_tokens": 1.5, "completion_tokens": -1}}, "usage.completion_tokens, usage.prompt_tokens"),
        ({"usage": None}, "usage"),
        ({"model": None}, "model"),
        *(({"finish_reason": reason}, "finish_reason") for reason in (None, "", 5, "abort")),
        ({"timing_ms": {"total": float("nan")}}, "timing_ms.total"),
        ({"npu_busy_delta_us": "5"}, "npu_busy_delta_us"),
        ({"emulated": "no"}, "emulated"),
    ],
)
def test_an_answer_with_a_wrong_field_is_malformed(change, field):
    with pytest.raises(NotAnAnswer, match=f"lacks a valid {field}:"):
        check_generation(ANSWER | change)
    with pytest.raises(NotAnAnswer):
        check_generation([ANSWER])


@pytest.mark.parametrize(
    "body",
    [
        [],
        {},
        {"text": 1},
        {"text": "a", "segments": [{"start": 0}]},
        {"text": "a", "segments": 7},
        {"text": "a", "words": [{"word": 1, "start": 0, "end": 1}]},
        {"text": "a", "duration": float("inf")},
        {"text": "a", "duration": []},
    ],
)
def test_a_transcription_with_a_wrong_field_is_malformed(body):
    with pytest.raises(NotAnAnswer, match="not a transcription"):
        transcription_in(body)


def test_a_node_is_not_left_out_for_longer_than_any_node_asks():
    for headers in ({"retry-after": "31536000"}, {"retry-after-ms": "999999999999"}):
        assert status_error("n", Reply(429, headers, b"{}"), None).retry_after == 300.0
    both = Reply(429, {"retry-after-ms": "1500", "retry-after": "9"}, b"{}")
    assert status_error("n", both, None).retry_after == 1.5


def test_an_error_says_what_its_code_means_and_which_parameter_to_check():
    body = {"error": {"message": "m", "type": "t", "code": "unsupported_parameter", "param": "messages[0].content"}}
    error = status_error("n", Reply(400, {}, json.dumps(body).encode()), None)
    assert (error.code, error.param) == ("unsupported_parameter", "messages")
    assert "not supported" in str(error)
    assert "check messages" in str(error)


def test_settings_come_from_file_then_environment_then_arguments(tmp_path, monkeypatch):
    path = tmp_path / "client.toml"
    path.write_text('nodes = ["http://file:1"]\nlocal_only = true\n[timeouts]\nembed = 3.0\n')
    monkeypatch.setenv("NPU_CLIENT_NODES", "http://one:1, http://two:2")
    monkeypatch.setenv("NPU_CLIENT_CLOUD__API_KEY", "sk-hunter2")
    monkeypatch.setenv("NPU_CLIENT_CLOUD__EMBEDDING_MODELS", '{"space": "model"}')
    settings = ClientSettings.load(path)
    assert settings.nodes == ("http://one:1", "http://two:2")
    assert settings.local_only
    assert settings.options().timeouts.embed == 3.0
    assert settings.cloud.embedding_models == {"space": "model"}
    assert "hunter2" not in repr(settings)


@pytest.mark.parametrize(
    ("value", "nodes"),
    [
        ('["http://one:1", "http://two:2"]', ("http://one:1", "http://two:2")),
        ("[::1]:8081,[::2]:8081", ("[::1]:8081", "[::2]:8081")),
    ],
)
def test_nodes_in_the_environment_are_a_json_list_or_separated_by_commas(monkeypatch, value, nodes):
    monkeypatch.setenv("NPU_CLIENT_NODES", value)
    assert ClientSettings.load().nodes == nodes


def test_the_shipped_settings_are_the_defaults(monkeypatch):
    monkeypatch.delenv("NPU_CLIENT_NODES", raising=False)
    assert ClientSettings.load(SHIPPED).model_dump() == ClientSettings().model_dump()


def test_an_unknown_setting_is_refused_with_the_nearest_name(tmp_path):
    path = tmp_path / "client.toml"
    path.write_text("[breaker]\nserver_failure = 2\n")
    unknown = re.escape("breaker.server_failure: there is no such setting; did you mean breaker.server_failures?")
    with pytest.raises(ConfigurationError, match=unknown):
        ClientSettings.load(path)


ERROR = {"error": {"code": "request_breaks_engine", "message": "m on NPU: it takes down the engine", "type": "x"}}


def test_it_is_a_rejection_in_a_stream_too_where_there_is_no_status():
    error = event_error("http://a", ERROR, None)
    assert type(error) is RequestRejected
    assert (error.status, error.code) == (400, "request_breaks_engine")
