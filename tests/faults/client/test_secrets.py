"""One fake key and one fake prompt go through every route and every failure; nothing that is shown may hold them."""

import logging
import traceback

import pytest
from aiohttp import web

from backend_client import CloudClient, CloudSettings, InferenceClient, NPUClient, NPUError
from tests.faults.scripted_node import error_response, sse, streamed

KEY = "sk-canary-8d1f0c"
CLOUD_KEY = "sk-cloud-canary-77aa"
PROMPT = "the canary sings at 47Zq11 Secret Street"
SECRETS = (KEY, CLOUD_KEY, PROMPT, "47Zq11", "canary")


def everything(error):
    """All texts of an error and of those it came from, the suppressed ones too."""
    seen, todo, texts = set(), [error], []
    while todo:
        current = todo.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        texts += [str(current), repr(current), repr(getattr(current, "attempts", ""))]
        texts += traceback.format_exception(current)
        todo += [current.__cause__, current.__context__, getattr(current, "cloud_error", None)]
    return "\n".join(texts)


async def echo_error(status, request):
    body = await request.text()
    return error_response(status, "invalid_request", f"you sent {body} with {request.headers['Authorization']}")


async def echo_key(request):
    key = request.headers["Authorization"].removeprefix("Bearer ")
    return error_response(401, key, f"no such key: {key}")


async def echo_garbage(request):
    return web.Response(body=await request.read(), headers={"X-Shape": "1,8", "X-Space": "s"})


async def echo_redirect(request):
    return web.Response(status=302, headers={"Location": "http://127.0.0.1:1/" + request.headers["Authorization"]})


async def echo_stream(request):
    body = await request.text()
    error = {"message": f"lost {body}", "code": body, "param": body, "type": body}
    return streamed(sse("token", {"text": PROMPT}), sse("error", {"error": error}), done=False)


async def drop(request):
    request.transport.abort()
    return web.Response()


def status(code):
    return lambda request: echo_error(code, request)


FAULTS = {
    **{str(code): status(code) for code in (400, 401, 404, 413, 422, 429, 500, 503, 504)},
    "key": echo_key,
    "garbage": echo_garbage,
    "redirect": echo_redirect,
    "stream": echo_stream,
    "drop": drop,
    "none": None,
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_nothing_shown_holds_a_secret(scripted, cloud, caplog, fault):
    caplog.set_level(logging.DEBUG)
    scripted.respond = FAULTS[fault]
    # The cloud's HTTP library logs reply headers as they come; a cloud that puts keys there has told them already.
    cloud.respond = FAULTS[fault] if fault != "redirect" else status(302)
    settings = CloudSettings(
        base_url=cloud.url, api_key=CLOUD_KEY, chat_model="chat", embedding_models={"space-a": "embed"}
    )
    shown = [repr(settings), str(settings)]
    async with InferenceClient(NPUClient([scripted.url], api_key=KEY), CloudClient(settings)) as client:
        shown += [repr(client), repr(client.npu)]
        for call in (client.embed_result, client.embed_many_result, client.generate):
            for model in (None, "unknown"):
                argument = [PROMPT] if call == client.embed_many_result else PROMPT
                try:
                    shown.append(repr(await call(argument, model=model, timeout=1)))
                except NPUError as error:
                    shown.append(everything(error))
        stream = client.stream(PROMPT, timeout=1)
        try:
            [_ async for _ in stream]
            shown.append(repr(stream.result))
        except NPUError as error:
            shown.append(everything(error))
    own = [record for record in caplog.records if not record.name.startswith("aiohttp.")]
    shown += [f"{record.getMessage()} {record.args!r} {record.exc_text}" for record in own]
    assert len(shown) > 8
    text = "\n".join(shown)
    for secret in SECRETS:
        for line in text.splitlines():
            assert secret not in line or __file__ in line or "test_secrets" in line, line


@pytest.mark.parametrize(
    "wrong",
    [
        {"spend_cap": 1, "chat_model": "without-a-price"},
        {"unknown": 1},
        {"base_url": f"http://user:{CLOUD_KEY}@cloud.example/v1"},
        {"max_tokens": CLOUD_KEY},
        {"api_key": f"{CLOUD_KEY}\n"},
    ],
)
def test_no_error_of_the_settings_quotes_the_key(wrong):
    with pytest.raises(ValueError, match="CloudSettings") as caught:
        CloudSettings(**({"api_key": CLOUD_KEY} | wrong))
    # Long inputs are shortened in the middle, and the beginning of a key is too much already.
    assert CLOUD_KEY[:6] not in everything(caught.value)
