"""npu-gateway over scripted nodes and a scripted cloud: bytes as they came, the client's promises, keys of teams."""

import asyncio
import contextlib
import gzip
import json
import re
import shlex
import stat
import time
import zlib
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from backend_client import ClientOptions
from backend_client.errors import ConfigurationError
from backend_client.gateway.cli import build_parser, main
from backend_client.gateway.keys import KeyStore
from backend_client.gateway.settings import GatewaySettings
from backend_client.options import Timeouts
from backend_client.testing.node import EMBEDDER, WRITER, model_row, route_headers
from tests.faults.client.gateways import (
    CHAT,
    CHAT_PATH,
    EVENTS,
    LINES,
    STREAM,
    asked,
    draining,
    gateway,
    made_keys,
    metrics_of,
    streaming,
)
from tests.faults.scripted_node import answering, choice, data_event, error_response, vectors_for
from tests.support.gateway import started_store

CHOICE = {"index": 0, "message": {"role": "assistant", "content": "Paris."}, "finish_reason": "stop"}
USAGE = {"prompt_tokens": 3, "completion_tokens": 2}
WHOLE = json.dumps({"id": "x", "model": WRITER, "choices": [CHOICE], "usage": USAGE}, indent=3).encode()


async def test_a_refusal_says_when_to_come_again_in_seconds_and_in_milliseconds(scripted):
    scripted.respond = answering(lambda: error_response(503, "engine_unavailable", retry_after_ms=200_000))
    async with gateway(scripted) as http:
        reply = await asked(http)
        assert (reply.status, reply.headers["Retry-After"]) == (503, "200")
        assert 199_000 <= int(reply.headers["retry-after-ms"]) <= 200_000


async def test_the_metrics_count_the_usable_nodes_of_a_model(pair):
    async with gateway(*pair) as http, asyncio.timeout(30):
        while f'npu_gateway_model_nodes{{model="{WRITER}"}} 2.0' not in await metrics_of(http):
            await asyncio.sleep(0.05)


async def test_a_body_goes_to_the_node_and_its_reply_comes_back_byte_for_byte(scripted):
    got = []

    async def respond(request):
        got.append((await request.read(), dict(request.headers)))
        return web.Response(body=WHOLE, content_type="application/json", headers=route_headers(WRITER))

    scripted.respond = respond
    sent = b'{ "model" : "fake-writer",\n "messages":[{"role":"user","content":"\\u0048i"}], "odd": 1.50 }'
    headers = {"Authorization": "Bearer theirs", "Cookie": "a=b", "X-Priority": "batch", "X-NPU-Restart-Wait-Ms": "9"}
    trace = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "vendor=1"}
    async with gateway(scripted) as http:
        reply = await http.post(CHAT_PATH, data=sent, headers={**headers, **trace, "X-Request-ID": "mine"})
        assert reply.status == 200
        assert await reply.read() == WHOLE
        assert (reply.headers["X-NPU-Gateway-Source"], reply.headers["X-NPU-Gateway-Node"]) == ("node", scripted.url)
        assert (reply.headers["X-Request-ID"], reply.headers["X-Model"]) == ("mine", WRITER)
    ((body, given),) = got
    assert body == sent
    assert (given["X-Priority"], given["X-Request-ID"]) == ("batch", "mine")
    assert not {"Cookie", "X-NPU-Restart-Wait-Ms"} & given.keys()
    assert given["Authorization"] == "Bearer shared-key"
    assert trace.items() <= given.items()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("DELETE", "/v1/responses/%2e%2e/%2e%2e/models/fake-writer"),
        ("POST", "/v1/responses/%2e%2e/%2e%2e/admin/reload"),
        ("GET", "/v1/responses/resp_0"),
        ("GET", "/v1/models/%2e%2e%2f%2e%2e%2fdashboard%2fstate"),
        ("DELETE", f"/v1/models/{WRITER}"),
        ("POST", "/v1/embeddings/../../admin/reload"),
        ("POST", "//v1/embeddings"),
        ("GET", "/metrics/../dashboard/state"),
        ("POST", "/api/pull"),
        ("PUT", "/v1/chat/completions"),
    ],
)
async def test_no_path_but_those_of_inference_reaches_a_node(scripted, method, path):
    async with gateway(scripted) as http:
        origin = (await http.get("/health")).url.origin()
        reply = await http.request(
            method, URL(f"{origin}{path}", encoded=True), json=CHAT if method == "POST" else None
        )
        body = await reply.json()
        # In Ollama's dialect the error is a text, and its code stands beside it.
        code = body.get("code") or body["error"]["code"]
        assert (reply.status, code) in {(404, "not_found"), (404, "model_not_found")}
    assert {(request.method, request.path) for request in scripted.requests} <= {("GET", "/v1/models")}


@pytest.mark.parametrize(
    ("path", "body"),
    [(CHAT_PATH, CHAT), (CHAT_PATH, STREAM), ("/v1/embeddings", {"input": ["a", "b"]})],
)
async def test_the_cloud_answers_what_no_node_can_unless_that_is_forbidden(scripted, cloud, path, body):
    scripted.respond = draining
    scripted.health_status = "draining"
    async with gateway(scripted, cloud=cloud) as http:
        reply = await http.post(path, json=body)
        assert (reply.status, reply.headers["X-NPU-Gateway-Source"]) == (200, "cloud")
        if "input" in body:
            rows = [row["embedding"] for row in (await reply.json())["data"]]
            np.testing.assert_allclose(rows, vectors_for(body["input"]), rtol=1e-5)
        asked = len(cloud.requests)
        kept = await http.post(path, json=body, headers={"X-NPU-Local-Only": "true"})
        assert kept.status == 503
        assert "local_only" in (await kept.json())["error"]["message"]
        assert len(cloud.requests) == asked


@pytest.mark.parametrize("given", [["soon"], ["-1"], ["1e3"], [""], ["1000", "2000"]])
async def test_a_limit_of_time_that_cannot_be_meant_is_refused(scripted, given):
    async with gateway(scripted) as http:
        reply = await http.post(CHAT_PATH, json=CHAT, headers=[("X-Request-Timeout-Ms", one) for one in given])
        assert reply.status == 400
        assert (await reply.json())["error"]["param"] == "X-Request-Timeout-Ms"
    assert not scripted.requests


@pytest.fixture
def endless(scripted):
    """What is set when the node is free again; until then it writes parts of this size."""
    left = asyncio.Event()

    def answer(size, pause):
        async def respond(request):
            response = web.StreamResponse(headers={"Content-Type": LINES, **route_headers(WRITER)})
            await response.prepare(request)
            try:
                while True:
                    await response.write(b'{"message":{"content":"' + b"H" * size + b'"},"done":false}\n')
                    await asyncio.sleep(pause)
            finally:
                left.set()

        scripted.respond = respond
        return left

    return answer


async def test_a_caller_that_leaves_ends_its_request_on_the_node(scripted, endless):
    left = endless(2, 0.01)
    async with gateway(scripted) as http:
        async with http.post("/api/chat", json=CHAT) as reply:
            await reply.content.readline()
        async with asyncio.timeout(10):
            await left.wait()


@pytest.mark.parametrize("headers", [{}, {"X-Request-Timeout-Ms": "1000"}])
async def test_a_caller_that_does_not_read_is_disconnected_and_its_node_is_free(scripted, endless, headers):
    left = endless(100_000, 0)
    # The time of the caller, or that without a part that it reads.
    timeouts = Timeouts() if headers else Timeouts(silence=1.0)
    async with (
        gateway(scripted, client={"options": ClientOptions(timeouts=timeouts)}) as http,
        http.post("/api/chat", json=CHAT, headers=headers) as reply,
        asyncio.timeout(60),
    ):
        assert reply.status == 200
        await left.wait()


@pytest.mark.parametrize(
    ("encoding", "encode", "status"),
    [
        ("gzip", gzip.compress, 200),
        ("deflate", zlib.compress, 200),
        ("identity", bytes, 200),
        ("gzip", bytes, 400),
        ("gzip", lambda body: gzip.compress(body)[:-10], 400),
        ("gzip", lambda body: gzip.compress(body + b" " * 100_000), 413),
        ("compress", bytes, 415),
        ("gzip, gzip", bytes, 415),
    ],
)
async def test_a_body_is_decoded_within_its_limit_or_refused(scripted, encoding, encode, status):
    scripted.respond = answering(
        lambda: web.Response(body=WHOLE, content_type="application/json", headers=route_headers(WRITER))
    )
    body, headers = encode(json.dumps(CHAT).encode()), {"Content-Encoding": encoding}
    async with gateway(scripted, max_body_bytes=50_000) as http:
        for _ in range(2):
            reply = await http.post(CHAT_PATH, data=body, headers=headers)
            assert reply.status == status, await reply.text()
            if status != 200:
                assert (await reply.json())["error"]["message"]


async def test_comments_of_a_node_are_no_parts_of_its_stream(scripted):
    comments = [b": still working\n\n", lambda: asyncio.sleep(0.02)] * 1000
    scripted.respond = streaming(data_event({"choices": [choice({"content": "Hi"})]}), *comments)
    async with (
        gateway(scripted, client={"options": ClientOptions(timeouts=Timeouts(silence=0.5))}) as http,
        http.post(CHAT_PATH, json=STREAM) as reply,
        asyncio.timeout(60),
    ):
        text = await reply.text()
    assert 0 < text.count(": still working") < 1000, "it is cut before the node ends it"
    assert "stream_interrupted" in text.splitlines()[-2]


@pytest.mark.parametrize("headers", [{}, {"X-Request-Timeout-Ms": "60000"}])
async def test_a_stream_that_flows_is_cut_by_the_time_of_its_caller_and_by_no_default(scripted, headers):
    now, later = [0.0], asyncio.Event()
    part, last = (b'{"message":{"content":"Hi"},"done":%s}\n' % done for done in (b"false", b"true"))
    scripted.respond = streaming(part, later.wait, part, lambda: asyncio.sleep(0.1), last, kind=LINES)
    async with gateway(scripted, client={"clock": lambda: now[0]}) as http:
        reply = await http.post("/api/chat", json=CHAT, headers=headers)
        await reply.content.readline()
        now[0] += 1000.0
        later.set()
        end = json.loads((await reply.text()).splitlines()[-1])
    assert "deadline" in end["error"] if headers else end["done"]
    assert ("X-Request-Timeout-Ms" in scripted.requests[0].headers) == bool(headers)


@pytest.mark.parametrize(
    ("path", "told"),
    [
        (CHAT_PATH, lambda body: body["error"]["code"] == "model_not_found"),
        ("/api/chat", lambda body: isinstance(body["error"], str)),
        ("/v1/messages", lambda body: body["error"]["type"] == "not_found_error" and body["type"] == "error"),
    ],
)
async def test_errors_have_the_form_of_the_dialect(scripted, path, told):
    async with gateway(scripted, max_body_bytes=5000) as http:
        reply = await http.post(path, json={**CHAT, "model": "no-such-model"})
        assert reply.status == 404
        assert told(await reply.json())
        long = await http.post(path, json={"model": "m" * 4000})
        assert len(await long.read()) < 1300
        for body, status in [(b"{", 400), (b"[]", 400), (b'{"model": 3}', 400), (b"x" * 6000, 413)]:
            reply = await http.post(path, data=body)
            assert reply.status == status
            assert (await reply.json())["error"]
        assert (await http.get(path)).status == 404
    # Whether a node has it in its store.
    assert {request.path for request in scripted.requests} == {"/api/show"}


async def test_a_refusal_of_a_node_is_forwarded_in_its_own_words(scripted):
    scripted.respond = answering(
        lambda: web.json_response({"error": "messages: must be a list", "extra": 1}, status=400)
    )
    async with gateway(scripted) as http:
        reply = await http.post("/api/chat", json=CHAT)
        assert (reply.status, await reply.json()) == (400, {"error": "messages: must be a list", "extra": 1})
    assert len(scripted.requests) == 1


async def test_a_key_is_asked_for_and_limits_models_and_the_cloud(scripted, cloud, tmp_path):
    file = tmp_path / "keys.db"
    (free,), (bound,), (kept,) = (
        made_keys(file, name, **rights)
        for name, rights in (("free", {}), ("bound", {"models": ["other"]}), ("kept", {"cloud": False}))
    )

    def as_holder(key):
        return {"Authorization": f"Bearer {key}"}

    async with gateway(scripted, cloud=cloud, keys=file) as http:
        two = CIMultiDict([("Authorization", f"Bearer {free}"), ("Authorization", "Bearer other")])
        other = as_holder(free[:-1] + ("A" if free[-1] != "A" else "B"))
        for headers in (two, other, {}, as_holder(free[:-1]), as_holder(""), {"x-api-key": "npugw_x"}):
            assert (await http.post(CHAT_PATH, json=CHAT, headers=headers)).status == 401
            assert (await http.get("/metrics", headers=headers)).status == 401
        assert (await http.get("/health")).status == 200
        assert (await http.post(CHAT_PATH, json=STREAM, headers=as_holder(free))).status == 200
        assert [(await asked(http, key)).status for key in (free, bound)] == [200, 403]
        assert (await (await http.get("/v1/models", headers=as_holder(bound))).json())["data"] == []
        scripted.respond = draining
        assert (await asked(http, kept, CHAT)).status == 503
        assert not cloud.requests
        assert (await asked(http, free, CHAT)).status == 200
        metrics = await metrics_of(http, free)
        assert 'status="403",team="bound"' in metrics
        assert free.split("_", 2)[2] not in metrics
        with contextlib.closing(KeyStore(file)) as store:
            store.revoke(free.split("_")[1])
        assert (await asked(http, free, CHAT)).status == 401


def test_keys_are_made_listed_rotated_and_ended_by_commands(tmp_path, capsys):
    file = tmp_path / "keys.db"

    def run(*words):
        assert main(["keys", "--keys", str(file), *words]) == 0
        return capsys.readouterr().out.strip()

    key = run("add", "team-a", "--model", "m", "--no-cloud")
    prefix = key.split("_")[1]
    listed = run("list")
    assert prefix in listed
    assert "team-a" in listed
    assert key.split("_", 2)[2] not in listed
    now = [1000.0]
    store = KeyStore(file, clock=lambda: now[0])
    store.read()
    assert store.find(key).name == "team-a"
    assert store.find(key).models == {"m"}
    following = run("rotate", prefix, "--overlap", "0")
    store.read()
    assert store.find(following).cloud is False
    now[0] = time.time()
    assert store.find(key) is None
    last = run("rotate", following.split("_")[1], "--overlap", "3600")
    store.read()
    for later, held in ((3000.0, True), (4000.0, False)):
        now[0] = time.time() + later
        assert (store.find(following) is not None) is held
    run("revoke", last.split("_")[1])
    store.read()
    assert store.find(last) is None
    store.close()
    assert main(["keys", "--keys", str(file), "revoke", "nothing"]) == 1
    assert "npu-gateway: there is no key 'nothing'" in capsys.readouterr().err
    for path in (file, tmp_path / "keys.db.secret"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert key.split("_", 2)[2].encode() not in path.read_bytes()


@pytest.fixture(params=["memory", "redis"])
def store(request):
    if request.param == "memory":
        yield "memory://", None
        return
    with started_store() as found:
        yield found


async def test_a_team_has_its_requests_and_tokens_a_minute_over_all_gateways(scripted, tmp_path, store):
    url, process = store
    values = {"keys": tmp_path / "keys.db", "store": url}
    (few,) = made_keys(values["keys"], "few", requests=3)
    (short,) = made_keys(values["keys"], "short", tokens=150)
    scripted.answer = "word " * 100
    async with gateway(scripted, **values) as one, gateway(scripted, **values) as other:
        second = one if process is None else other
        assert [(await asked(http, few)).status for http in (one, second, one)] == [200] * 3
        refused = await asked(second, few)
        assert refused.status == 429
        assert 1 <= int(refused.headers["Retry-After"]) <= 60
        assert "3 requests a minute" in (await refused.json())["error"]["message"]
        statuses = [(await asked(http, short)).status for http in (one, second, one, second)]
        assert statuses[0] == 200
        assert statuses[-1] == 429, "two answers of 100 tokens to prompts of four"
        if process is None:
            return
        process.kill()
        process.wait(10)
        assert (await asked(one, few)).status == 200
        assert "npu_gateway_store_failures_total 0.0" not in await metrics_of(one, short)


def test_the_commands_of_its_page_do_what_it_says(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[3] / "docs" / "gateway.md").read_text(encoding="utf-8")
    commands = [shlex.split(line)[1:] for line in page.splitlines() if line.startswith("npu-gateway ")]
    assert [command[0] for command in commands] == ["serve", "keys", "keys", "nodes", "nodes"]
    assert build_parser().parse_args(commands[0]).nodes == ["http://10.0.0.21:8081", "http://10.0.0.22:8081"]
    monkeypatch.chdir(tmp_path)
    assert [main(command) for command in commands[1:3]] == [0, 0]
    listed = capsys.readouterr().out.splitlines()[-1].split()
    assert listed[1:7] == ["team-a", "cloud", "up", "to", "20", "a"]
    assert [main(command) for command in commands[3:]] == [0, 0]
    assert capsys.readouterr().out.splitlines()[-1].split() == ["npu-berlin-1", "silent", "-", "-"]
    assert "600 requests, 200000 tokens" in " ".join(listed)
    for name in re.findall(r"NPU_GATEWAY_(\w+)", page):
        assert name.lower() in GatewaySettings.model_fields


def test_without_keys_it_listens_on_loopback_alone():
    assert GatewaySettings.load(host="::1").host == "::1"
    with pytest.raises(
        ConfigurationError, match=r"host must be a loopback address while there are no keys, got 192\.0\.2\.1"
    ):
        GatewaySettings.load(host="192.0.2.1")


async def test_the_lists_of_the_nodes_are_joined(pair):
    for index, node in enumerate(pair):
        rows = [{"name": "both"}, {"name": f"own-{index}"}]
        node.respond = answering(lambda rows=rows: web.json_response({"models": rows}))
    async with gateway(*pair) as http:
        models = (await (await http.get("/api/tags")).json())["models"]
        assert sorted(row["name"] for row in models) == ["both", "own-0", "own-1"]
        ids = [row["id"] for row in (await (await http.get("/v1/models")).json())["data"]]
        assert sorted(ids) == sorted([EMBEDDER, WRITER])
        form = await (await http.get("/v1/models", headers={"anthropic-version": "2023-06-01"})).json()
        assert form["has_more"] is False
        assert form["first_id"] == form["data"][0]["id"]


async def test_models_are_listed_to_anthropics_clients_in_pages(scripted):
    for number in range(4):
        scripted.offer("generation", f"writer-{number}")
    headers = {"anthropic-version": "2023-06-01"}

    async with gateway(scripted) as http:

        async def page(**query):
            reply = await http.get("/v1/models", params=query, headers=headers)
            body = await reply.json()
            if reply.status != 200:
                assert (reply.status, body["error"]["type"]) == (400, "invalid_request_error")
                return None
            ids = [row["id"] for row in body["data"]]
            assert (body["first_id"], body["last_id"]) == ((ids[0], ids[-1]) if ids else (None, None))
            return ids, body["has_more"]

        every, more = await page()
        assert (len(every), more) == (5, False)
        assert await page(limit=2) == (every[:2], True)
        assert await page(limit=2, after_id=every[1]) == (every[2:4], True)
        assert await page(limit=1000, after_id=every[3]) == (every[4:], False)
        assert await page(limit=2, before_id=every[4]) == (every[2:4], True)
        assert await page(limit=2, before_id=every[1]) == (every[:1], False)
        for wrong in ({"limit": "0"}, {"limit": "1001"}, {"limit": "٣"}, {"limit": ""}, {"after_id": "none"}):
            assert await page(**wrong) is None


async def test_ollama_is_told_which_model_is_not_there(scripted):
    async with gateway(scripted) as http:
        for field in ("model", "name"):
            reply = await http.post("/api/show", json={field: "none"})
            lacks = {"error": "model 'none' not found", "code": "model_not_found"}
            assert (reply.status, await reply.json()) == (404, lacks)
        assert (await http.post("/api/show", data=b"[")).status == 400
        assert (await http.get("/api/version")).status == 503


async def test_an_error_event_of_the_node_is_the_streams_last_and_comes_once(scripted):
    failed = data_event({"error": {"message": "the engine died", "code": "engine_unavailable"}})
    chunk = {"id": "c", "created": 0, "model": WRITER, "object": "chat.completion.chunk"}
    first = data_event({**chunk, "choices": [choice({"content": "Hel"})]})
    # In a part of its own: what fails in the first one is another node's to answer.
    scripted.respond = streaming(first, lambda: asyncio.sleep(0.2), failed)
    async with gateway(scripted) as http:
        text = await (await http.post(CHAT_PATH, json=STREAM)).read()
        assert text.count(b'"error"') == 1
        assert text.endswith(failed)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", [CHAT_PATH, "/api/chat"])
@pytest.mark.parametrize(
    ("code", "refused", "told"),
    [("engine_crashed", True, [None, "1"]), ("engine_unavailable", False, [None, None, None])],
    ids=["crashed", "killed from outside"],
)
async def test_a_request_that_crashed_two_engines_goes_to_no_third(pair, scripted, path, stream, code, refused, told):
    deaths, lines = [], path == "/api/chat"
    failed = {"error": "it died", "code": code} if lines else {"error": {"message": "it died", "code": code}}
    frame = json.dumps(failed).encode() + b"\n" if lines else data_event(failed)

    async def respond(request):
        deaths.append(request.headers.get("X-NPU-Engine-Deaths"))
        if len(deaths) > 2:
            return None
        if stream:
            return await streaming(frame, kind=LINES if lines else EVENTS)(request)
        return web.json_response(failed, status=503)

    for node in (*pair, scripted):
        node.respond = respond
    async with gateway(*pair, scripted) as http:
        reply = await http.post(path, json=CHAT | {"stream": stream}, headers={"X-NPU-Engine-Deaths": "0"})
        assert (reply.status == 400, deaths) == (refused, told)
        assert ("do not send it again" in await reply.text()) == refused


async def test_a_key_for_some_models_is_shown_no_others(scripted, tmp_path):
    keys = made_keys(tmp_path / "keys.db", "bound", models=[WRITER]) + made_keys(tmp_path / "keys.db", "free")
    bound, free = ({"x-api-key": key} for key in keys)
    rows = [{"name": f"{WRITER}:latest"}, {"name": EMBEDDER}]
    scripted.respond = answering(lambda: web.json_response({"models": rows, "of": "any"}))
    async with gateway(scripted, keys=tmp_path / "keys.db") as http:
        for headers, count in ((bound, 1), (free, 2)):
            assert len((await (await http.get("/api/tags", headers=headers)).json())["models"]) == count
            assert len((await (await http.get("/v1/models", headers=headers)).json())["data"]) == count
        for headers, status in ((bound, 404), (free, 200)):
            assert (await http.get(f"/v1/models/{EMBEDDER}", headers=headers)).status == status
            assert (await http.post("/api/show", json={"model": EMBEDDER}, headers=headers)).status == status
        form = aiohttp.FormData()
        for name in (WRITER, EMBEDDER):
            form.add_field("model", name)
        form.add_field("file", b"RIFF", filename="a.wav")
        reply = await http.post("/v1/audio/transcriptions", data=form, headers=bound)
        assert (reply.status, "one model" in await reply.text()) == (400, True)


async def test_errors_of_models_are_in_anthropics_form_for_its_clients(scripted):
    async with gateway(scripted) as http:
        headers = {"anthropic-version": "2023-06-01", "X-Request-ID": "mine"}
        for path in ("/v1/models/none", "/v1/models?limit=0", f"/v1/models/{EMBEDDER}", "/v1/models/a/b"):
            reply = await http.get(path, headers=headers)
            body = await reply.json()
            assert (body["type"], reply.status) in {("error", 404), ("error", 400)}, path
            assert body["error"]["type"] in {"not_found_error", "invalid_request_error"}
            assert (reply.headers["request-id"], reply.headers["X-Request-ID"]) == ("mine", "mine")
        reply = await http.get(f"/v1/models/{WRITER}", headers=headers)
        assert ((await reply.json())["type"], reply.headers["request-id"]) == ("model", "mine")
        stream = {"messages": [], "max_tokens": 1, "model": "none"}
        assert (await http.post("/v1/messages", json=stream)).headers["request-id"].startswith("req_")
        plain = await http.get("/v1/models/none")
        assert (await plain.json())["error"]["code"] == "model_not_found"
        assert "request-id" not in plain.headers


async def test_a_request_that_names_no_model_of_several_is_the_callers_mistake(scripted):
    scripted.offer("generation", "another")
    async with gateway(scripted) as http:
        reply = await http.post("/inference", json={"prompt": "a"})
        assert (reply.status, (await reply.json())["error"]["code"]) == (400, "invalid_request")
    assert not scripted.requests


async def test_a_request_that_names_no_model_is_for_the_default_of_the_fleet(scripted):
    """Of which the node has another one: `spaces` of the client names it."""
    scripted.models = {"another": model_row("embedding") | {"dimensions": 8, "space": "space-c"}, **scripted.models}
    async with gateway(scripted) as http:
        reply = await http.post("/embeddings", json={"texts": ["a"]})
        assert (reply.status, reply.headers["X-Model"]) == (200, EMBEDDER)


PARTS = {
    CHAT_PATH: b'data: {"choices":[{"index":0,"delta":{"content":"Hello"},"finish_reason":null}]}\n\n',
    "/v1/responses": b'data: {"type":"response.output_text.delta","delta":"Hello"}\n\n',
    "/v1/messages": b'data: {"type":"content_block_delta","delta":{"type":"text_delta","text":"Hello"}}\n\n',
    "/inference": b'event: token\ndata: {"text":"Hello"}\n\n',
    "/api/chat": b'{"message":{"content":"Hello"},"done":false}\n',
    "/api/generate": b'{"response":"Hello","done":false}\n',
}


@pytest.mark.parametrize("path", PARTS)
async def test_an_interrupted_stream_says_how_much_its_caller_has_and_is_not_begun_again(pair, path):
    for node in pair:
        node.respond = streaming(PARTS[path] * 2, kind=LINES if path.startswith("/api/") else EVENTS)
    async with gateway(*pair) as http:
        text = await (await http.post(path, json={**STREAM, "prompt": "Hi", "input": "Hi"})).text()
    assert text.count("Hello") == 2
    assert "the answer stopped after 10 characters" in text
    assert len(pair[0].requests) + len(pair[1].requests) == 1
