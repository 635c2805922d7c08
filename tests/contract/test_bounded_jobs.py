"""The contract of the bounded jobs as a black box: HTTP and command line, a cut model on the emulated NPU."""

import concurrent.futures
import fcntl
import itertools
import json
import socket
import time

import pytest

from tests.contract.sidecar import start_sidecar

pytestmark = [pytest.mark.real, pytest.mark.timeout(600), pytest.mark.usefixtures("store")]

CANARY = "zanzibar-7f3a9c-secret"
KEYS = {
    "model",
    "device",
    "job",
    "text",
    "json",
    "timing_ms",
    "npu_busy_delta_us",
    "npu_busy_before_us",
    "npu_busy_after_us",
    "cache_dir",
    "emulated",
}


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory, quick_models):
    with start_sidecar(tmp_path_factory.mktemp("bounded"), "--log-level", "debug", **quick_models) as running:
        running.wait_until(lambda body: body["loaded"])
        yield running


def test_health_says_what_the_contract_names(sidecar):
    status, body = sidecar.health()
    assert status == 200
    assert (body["ok"], body["loaded"], body["device"], body["emulated"]) == (True, True, "NPU", True)
    assert body["jobs"] == ["memory_candidate", "notification", "summary", "title"]
    assert body["max_input_chars"] == 6000
    assert body["initial_load_ms"] > 0
    assert body["busy_time_us"] > 0
    assert body["cache_exists"] is True
    assert body["bind"] == sidecar.url.removeprefix("http://")
    assert body["model_path"].endswith(body["model"])


def test_a_title_is_made_and_proven(sidecar):
    status, body = sidecar.generate(tokens=12)
    assert status == 200, body
    assert set(body) - {"npu_busy_exclusive"} == KEYS
    assert (body["job"], body["device"], body["json"]) == ("title", "NPU", None)
    assert body["npu_busy_after_us"] - body["npu_busy_before_us"] == body["npu_busy_delta_us"] > 0
    assert set(body["timing_ms"]) == {"load", "initial_load", "generate", "total"}
    assert body["timing_ms"]["load"] == 0
    assert 1 <= len(body["text"].split()) <= 8


@pytest.mark.parametrize(
    ("path", "body", "job"),
    [
        ("/v1/worker/generate", {"job": "memory"}, "memory_candidate"),
        ("/v1/worker/extract-memory-candidates", {}, "memory_candidate"),
        ("/v1/worker/condense-notification", {}, "notification"),
    ],
)
def test_json_that_the_budget_cut_is_null_and_the_text_is_there(sidecar, path, body, job):
    status, reply = sidecar.request("POST", path, {"input": "Disk full.", "max_new_tokens": 3, **body})
    assert status == 200, reply
    assert (reply["job"], reply["json"]) == (job, None)
    assert reply["text"].startswith("{")


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"no json", {}, 400),
        ({"job": "poem", "input": "a"}, {}, 400),
        ({"job": "title", "input": "a" * 6001}, {}, 400),
        ({"job": "title", "input": CANARY * 60_000}, {}, 413),
        ({"job": "title", "input": "a", "max_new_tokens": 257}, {}, 400),
        ({"job": "title", "input": "a"}, {"Host": "evil.example"}, 400),
        ({"job": "title", "input": "a"}, {"Origin": "https://evil.example"}, 400),
    ],
)
def test_what_is_out_of_bounds_is_refused_in_the_form_of_the_contract(sidecar, body, headers, status):
    refused, reply = sidecar.request("POST", "/v1/worker/generate", body, headers)
    assert (refused, list(reply)) == (status, ["error"])
    assert isinstance(reply["error"], str)


def test_six_thousand_characters_of_any_plane_are_taken(sidecar):
    for character in ("a ", "😀"):
        status, reply = sidecar.generate(text=character * (6000 // len(character)), tokens=1)
        assert reply.get("error") in {
            None,
            "the model gave no usable text; try again with another input or more tokens",
        }
        assert status in {200, 503}
        assert reply["npu_busy_delta_us"] > 0
        assert reply["input_truncated"]["kept_characters"] < 6000


def test_a_long_input_leaves_room_for_as_many_tokens_as_are_asked_for(sidecar):
    few, many = (sidecar.generate(text="a " * 3000, tokens=tokens)[1] for tokens in (1, 256))
    kept = [reply["input_truncated"]["kept_characters"] for reply in (few, many)]
    assert kept[0] - kept[1] > 256, kept


def test_everything_else_is_not_found(sidecar):
    for method, path in (("GET", "/"), ("GET", "/health"), ("POST", "/v1/chat/completions"), ("GET", "/metrics")):
        assert sidecar.request(method, path) == (404, {"error": "not found"})
    status, reply = sidecar.request("GET", "/v1/worker/generate")
    assert status == 405
    assert isinstance(reply["error"], str)


def test_what_is_not_http_is_answered_in_the_form_of_the_contract(sidecar):
    host, port = sidecar.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(f"GET {CANARY}\r\n\r\n".encode())
        head, _, body = b"".join(iter(lambda: connection.recv(4096), b"")).partition(b"\r\n\r\n")
    assert head.split()[1] == b"400"
    assert list(json.loads(body)) == ["error"]
    assert isinstance(json.loads(body)["error"], str)


def test_a_counter_that_does_not_move_proves_nothing(sidecar):
    with sidecar.counter.still():
        status, reply = sidecar.generate()
    assert status == 503
    assert set(reply) - {"npu_busy_exclusive"} == KEYS | {"error"}
    assert reply["npu_busy_delta_us"] == 0
    assert reply["text"]
    assert "did not move" in reply["error"]


def test_a_counter_that_goes_backwards_proves_nothing(sidecar):
    with sidecar.counter.still() as counter, concurrent.futures.ThreadPoolExecutor() as pool:
        with sidecar.stopped_engine():
            waiting = pool.submit(sidecar.generate)
            sidecar.wait_for_a_generation()
            counter.write(5)
        status, reply = waiting.result()
    assert status == 503
    assert reply["npu_busy_delta_us"] == 5 - reply["npu_busy_before_us"] < 0
    assert "backwards" in reply["error"]


@pytest.mark.parametrize("how", ["missing", "unreadable", "garbage"])
def test_without_a_counter_nothing_is_generated(sidecar, how):
    with sidecar.counter.still() as counter:
        counter.file.unlink()
        if how == "unreadable":
            counter.file.mkdir()
        elif how == "garbage":
            counter.file.write_text("many\n")
        status, reply = sidecar.generate()
        health_status, health = sidecar.health()
        counter.file.rmdir() if how == "unreadable" else counter.file.unlink(missing_ok=True)
    assert status == 503
    assert (reply["text"], reply["npu_busy_before_us"]) == (None, None)
    assert reply["error"].startswith("refused: the NPU's busy counter cannot be read")
    assert health["busy_time_us"] is None
    assert health["reasons"]["busy_time_us"] in reply["error"]
    assert (health_status, health["ok"]) == (503, False), "no job can succeed"
    assert "busy counter cannot be read" in health["reasons"]["ok"]


def test_another_process_with_the_lock_is_waited_for(sidecar):
    with concurrent.futures.ThreadPoolExecutor() as pool, sidecar.lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        before = sidecar.health()[1]["busy_time_us"]
        waiting = pool.submit(sidecar.generate)
        while sidecar.health()[1]["busy_time_us"] < before + 20_000:
            assert not waiting.done()
        fcntl.flock(file, fcntl.LOCK_UN)
        assert waiting.result()[0] == 200


def test_jobs_that_come_at_once_run_one_after_another(sidecar):
    with concurrent.futures.ThreadPoolExecutor() as pool:
        replies = list(pool.map(lambda _: sidecar.generate(), range(3)))
    assert [status for status, _ in replies] == [200] * 3
    spans = sorted((reply["npu_busy_before_us"], reply["npu_busy_after_us"]) for _, reply in replies)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))


def leave_in_the_middle(sidecar, body):
    """Ask for a job and hang up while it runs."""
    host, port = sidecar.url.removeprefix("http://").split(":")
    with sidecar.stopped_engine(), socket.create_connection((host, int(port)), timeout=30) as connection:
        head = f"POST /v1/worker/generate HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall((head + body).encode())
        sidecar.wait_for_a_generation()
    while sidecar.is_locked():
        time.sleep(0.005)


def test_no_log_holds_what_was_sent_or_generated(sidecar):
    """Last, since it kills the engine."""
    # More than 5 s: the engine is loaded a second time.
    texts = []
    body = {"job": "summary", "input": f"{CANARY} went home.", "max_new_tokens": 8}
    for path in ("generate", "extract-memory-candidates", "condense-notification"):
        sent = body if path == "generate" else {key: body[key] for key in ("input", "max_new_tokens")}
        texts.append(sidecar.request("POST", f"/v1/worker/{path}", sent)[1]["text"])
    with sidecar.counter.still() as counter:
        texts.append(sidecar.request("POST", "/v1/worker/generate", body)[1]["text"])
        counter.file.unlink()
        assert sidecar.request("POST", "/v1/worker/generate", body)[0] == 503
    assert sidecar.request("GET", f"/models?{CANARY}")[0] == 200
    assert sidecar.request("GET", f"/healthz?{CANARY}")[0] == 200
    leave_in_the_middle(sidecar, json.dumps({**body, "max_new_tokens": 64}))
    for bad in (CANARY.encode(), {"job": CANARY, "input": CANARY}, {CANARY: 1}, {**body, "max_new_tokens": CANARY}):
        assert sidecar.request("POST", "/v1/worker/generate", bad)[0] == 400
    assert sidecar.request("POST", f"/{CANARY}?{CANARY}", {**body})[0] == 404
    assert sidecar.request("GET", "/healthz", headers={"X-Request-ID": CANARY, "Origin": f"http://{CANARY}"})[0] == 400
    with concurrent.futures.ThreadPoolExecutor() as pool, sidecar.stopped_engine() as engine:
        waiting = pool.submit(sidecar.request, "POST", "/v1/worker/generate", body)
        sidecar.wait_for_a_generation()
        engine.kill()
        status, reply = waiting.result()
    # At once: the job has the NPU's lock, which the examination of the next engine waits for; so does the next job.
    assert (status, list(reply)) == (503, ["error"])
    assert sidecar.generate()[0] == 200
    log = sidecar.log.read_text()
    assert "its known question could not be run" not in log
    for status in (503, 413, "cancelled"):
        assert f"POST /v1/worker/generate {status}" in log
    assert CANARY not in log
    assert len(texts) == 4
    for text in texts:
        assert len(text) > 8
        assert text not in log
