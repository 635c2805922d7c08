"""A gateway over scripted nodes and a scripted cloud, and what its tests share."""

import contextlib
import time
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer

from backend_client import CloudClient, CloudSettings, InferenceClient, NPUClient
from backend_client.gateway.app import make_app
from backend_client.gateway.keys import KeyStore
from backend_client.gateway.settings import GatewaySettings
from backend_client.testing.node import EMBEDDER, WRITER, route_headers
from tests.faults.scripted_node import answering, error_response

CHAT_PATH = "/v1/chat/completions"
CHAT = {"model": WRITER, "messages": [{"role": "user", "content": "Hi"}]}
STREAM = {**CHAT, "stream": True}
EVENTS, LINES = "text/event-stream", "application/x-ndjson"


def cloud_settings(cloud, **more):
    mapped = {"embedding_models": {"space-a": "cloud-minilm"}, "chat_model": "cloud-chat"}
    return CloudSettings(base_url=cloud.url, api_key="sk-cloud", **(mapped | more))


draining = answering(lambda: error_response(503, "draining"))


@asynccontextmanager
async def gateway(*nodes, cloud=None, cloud_prices=None, spend_cap=None, local_only=False, client=None, **values):
    npu = NPUClient(
        [node.url for node in nodes],
        spaces={EMBEDDER: "space-a"},
        api_key="shared-key",
        registering=not nodes,
        **(client or {}),
    )
    mapped = {"chat_models": {WRITER: "cloud-chat"}, "prices": cloud_prices or {}, "spend_cap": spend_cap}
    behind = CloudClient(cloud_settings(cloud, **mapped)) if cloud else None
    served = InferenceClient(npu, behind, local_only=local_only, clock=(client or {}).get("clock", time.monotonic))
    app = make_app(GatewaySettings.load(**values), served)
    server = TestServer(app, host="127.0.0.1", handler_cancellation=True)
    async with server, aiohttp.ClientSession(server.make_url("/")) as session:
        yield session


def made_keys(path, *names, **rights):
    """New keys of these teams, all with the same rights."""
    with contextlib.closing(KeyStore(path)) as store:
        return [store.add(name, **rights) for name in names]


async def asked(http, key=None, body=STREAM):
    """The reply to a chat, read to its end."""
    headers = {"x-api-key": key} if key else {}
    async with http.post(CHAT_PATH, json=body, headers=headers) as reply:
        await reply.read()
        return reply


async def metrics_of(http, key=None):
    return await (await http.get("/metrics", headers={"x-api-key": key} if key else {})).text()


def streaming(*parts, kind=EVENTS, **headers):
    """What answers with a stream of these parts: bytes, or a function, which is awaited in its place."""

    async def respond(request):
        response = web.StreamResponse(headers={"Content-Type": kind, **route_headers(WRITER), **headers})
        await response.prepare(request)
        for part in parts:
            await (response.write(part) if isinstance(part, bytes) else part())
        return response

    return respond
