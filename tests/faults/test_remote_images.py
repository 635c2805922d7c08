"""Images by URL, over real sockets on loopback: a scripted server that misbehaves, and a resolver that lies."""

import asyncio
import contextlib
import io
import logging
import ssl
import time
from contextlib import asynccontextmanager

import pytest
from PIL import Image

from tests.faults.client.test_tls import issue, make_authority
from tests.support.application import application
from tests.support.scripted_engines import Machine
from tests.support.task_models import SEER, placement, seer
from tests.unit.worker_node.api.test_memory_of_every_task import Answering
from worker_node.domain import Picture
from worker_node.errors import BadRequest, DeadlineExceeded, Overloaded, PayloadTooLarge
from worker_node.settings import NodeSettings
from worker_node.tasks.generate.api.remote_images.fetching import FetchLimits, ImageFetcher
from worker_node.tasks.generate.serving.pictures import PictureDecoder

WHERE = "messages[0].content[1].image_url.url"


def _png():
    target = io.BytesIO()
    Image.new("RGB", (48, 40), "red").save(target, "PNG")
    return target.getvalue()


PNG = _png()


def reply(status="200 OK", body=PNG, **headers):
    head = {"Content-Type": "image/png", "Content-Length": str(len(body)), "Connection": "close"}
    head |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{name}: {value}" for name, value in head.items() if value is not None]
    return "\r\n".join([f"HTTP/1.1 {status}", *lines, "", ""]).encode() + body


class Server:
    """Answers every request on a port of 127.0.0.1 with `answer`: bytes, or a function that writes them itself."""

    def __init__(self):
        self.requests = []
        self.answer = reply()
        self.ended = asyncio.Event()
        self._serving = set()

    @asynccontextmanager
    async def running(self, tls=None):
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=tls)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in self._serving:
                task.cancel()
            await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, reader, writer):
        self._serving.add(asyncio.current_task())
        try:
            self.requests.append(await reader.readuntil(b"\r\n\r\n"))
            if callable(self.answer):
                await self.answer(writer)
            else:
                writer.write(self.answer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        except asyncio.CancelledError:
            writer.transport.abort()
            raise
        finally:
            writer.close()
            self.ended.set()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


@pytest.fixture
async def server():
    async with Server().running() as running:
        yield running


async def fetched(fetcher, url, *, most=10_000, seconds=60.0):
    return await fetcher.fetch(url, WHERE, most, time.monotonic() + seconds)


def allowing(*entries, **options):
    fetcher = ImageFetcher(**options)
    fetcher.follow(NodeSettings(allow_image_hosts=entries))
    return fetcher


async def test_an_image_of_a_host_that_is_named_with_its_port_is_fetched_without_secrets(server):
    fetcher = allowing(f"http://127.0.0.1:{server.port}")
    assert await fetched(fetcher, f"http://127.0.0.1:{server.port}/a%2Fb.png?x=%7E1#part") == PNG
    [request] = server.requests
    head = request.decode().splitlines()
    assert head[0] == "GET /a%2Fb.png?x=%7E1 HTTP/1.1", "the URL goes out as it was signed"
    assert not [line for line in head if line.lower().startswith(("cookie", "authorization", "x-api-key"))]


async def test_nothing_is_fetched_by_default(server):
    with pytest.raises(BadRequest, match=r"fetches no remote URLs \(allow_image_hosts names no host\)") as refused:
        await fetched(ImageFetcher(), f"http://127.0.0.1:{server.port}/")
    assert refused.value.param == WHERE
    assert not server.requests


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://127.0.0.1:{port}/", "allow_image_hosts does not name it"),
        ("http://images.test:{port}/", "allow_image_hosts does not name it"),
        ("https://other.test/", "https://other.test:443: allow_image_hosts does not name it"),
        ("https://user:secret@images.test/", "may not hold a user name or a password"),
        ("https://secret@images.test/", "may not hold a user name or a password"),
        ("https:///secret", "not a URL"),
        ("https://images.test:99999/secret", "not a URL"),
        ("https://images.test\\@127.0.0.1:{port}/secret", "not a URL"),
        ("https://images.test/a\r\nHost: secret", "not a URL"),
        ("https://[::1%25eth0]/secret", "not a URL"),
        ("https://images.test/" + 5000 * "secret", "not a URL"),
    ],
)
async def test_urls_that_are_not_allowed_are_refused_before_any_name_is_resolved(server, url, says):
    asked = []

    async def resolve(host, _port):
        asked.append(host)
        return ["127.0.0.1"]

    with pytest.raises(BadRequest, match=says) as refused:
        await fetched(allowing("images.test", resolve=resolve), url.format(port=server.port))
    assert "secret" not in refused.value.message
    assert not asked
    assert not server.requests


@pytest.mark.parametrize("address", ["127.0.0.1", "::ffff:127.0.0.1", "10.0.0.1", "169.254.169.254", "::1", "fe80::1"])
async def test_a_name_that_means_a_private_address_is_refused(address):
    async def resolve(_host, _port):
        # One public address among them does not make it better.
        return ["93.184.216.34", address]

    with pytest.raises(BadRequest, match=r"images\.test has an address that is not public.*with its port"):
        await fetched(allowing("images.test", "*.test", resolve=resolve), "https://images.test/a.png")


@pytest.mark.parametrize(
    "url", ["https://127.0.0.1/", "https://[::1]/", "https://[::ffff:127.0.0.1]/", "https://127.1/"]
)
async def test_private_addresses_are_refused_however_they_are_written(url):
    with pytest.raises(BadRequest, match="is not public"):
        await fetched(allowing("*"), url)


async def test_a_name_that_means_another_address_by_now_is_not_asked_again(server):
    """Rebinding: the first answer is checked, and the connection goes there."""
    answers = [["127.0.0.1"], ["127.0.0.2"]]

    async def resolve(_host, _port):
        return answers.pop(0)

    checked = []

    def public(address):
        checked.append(address)
        return address == "127.0.0.1"

    fetcher = allowing(f"http://*.test:{server.port}", resolve=resolve, public=public)
    url = f"http://images.test:{server.port}/"
    assert await fetched(fetcher, url) == PNG
    assert answers == [["127.0.0.2"]], "it was resolved once"
    with pytest.raises(BadRequest, match="is not public"):
        await fetched(fetcher, url)
    assert checked == ["127.0.0.1", "127.0.0.2"]
    assert len(server.requests) == 1
    assert f"Host: images.test:{server.port}" in server.requests[0].decode()


@pytest.mark.parametrize(
    ("answer", "error", "says"),
    [
        (reply("302 Found", b"", Location="http://127.0.0.1:1/secret"), BadRequest, "redirect, which is not followed"),
        (reply("308 Permanent Redirect", b"", Location="/b.png"), BadRequest, "redirect, which is not followed"),
        (reply("404 Not Found", b"secret"), BadRequest, "status 404"),
        (reply("206 Partial Content"), BadRequest, "status 206"),
        (reply(Content_Type="text/html"), BadRequest, "PNG, JPEG, WebP or GIF; 127.0.0.1 sends text/html"),
        (reply(Content_Type="image/svg+xml"), BadRequest, "sends image/svg"),
        (reply(Content_Type=None), BadRequest, "sends application/octet-stream"),
        (reply(Content_Encoding="gzip"), BadRequest, "compressed once more"),
        (reply(Content_Length="10001"), PayloadTooLarge, "more than 10000 bytes"),
        (reply(Content_Length="99999999999999999999999"), BadRequest, "cannot be fetched from 127.0.0.1"),
        (reply(Content_Length=None, body=bytes(10_001)), PayloadTooLarge, "more than 10000 bytes"),
        (reply(body=b""), BadRequest, "is empty"),
        (reply(Content_Length="5000"), BadRequest, "cannot be fetched from 127.0.0.1"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", BadRequest, "cannot be fetched from 127.0.0.1"),
        (b"", BadRequest, "cannot be fetched from 127.0.0.1"),
        (b"HTTP/1.1 200 OK\r\nX: " + bytes(100_000), BadRequest, "cannot be fetched from 127.0.0.1"),
    ],
)
async def test_what_is_no_image_is_refused_with_the_reason(server, answer, error, says):
    server.answer = answer
    with pytest.raises(error, match=says) as refused:
        await fetched(allowing(f"http://127.0.0.1:{server.port}"), f"http://127.0.0.1:{server.port}/a?key=secret")
    assert type(refused.value) is error
    assert refused.value.param == WHERE
    assert "secret" not in refused.value.message
    assert server.requests


async def test_an_endless_image_ends_at_the_bound(server):
    sent = 0

    async def endless(writer):
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n\r\n")
        while True:
            writer.write(bytes(10_000))
            sent += 10_000
            await writer.drain()

    server.answer = endless
    fetcher = allowing(f"http://127.0.0.1:{server.port}")
    with pytest.raises(PayloadTooLarge):
        await fetched(fetcher, f"http://127.0.0.1:{server.port}/", most=1_000_000)
    await asyncio.wait_for(server.ended.wait(), 60)
    # What the kernel's buffers hold was sent, too.
    assert sent < 50_000_000


def flood(head, piece):
    """An answer that goes on with the same few bytes until the other side has enough; it yields what it sent."""

    async def answer(writer):
        writer.write(head)
        while True:
            writer.write(piece * 10_000)
            await writer.drain()

    return answer


CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (b"", b"HTTP/1.1 103 Early Hints\r\n\r\n"),
        (b"", b"HTTP/1.1 103\n\n"),
        (CHUNKED, b"1\r\n\x89\r\n"),
        (CHUNKED, b"1;" + b"a" * 1000 + b"\r\n\x89\r\n"),
    ],
    ids=["interim replies", "with bare line feeds", "chunks of a byte", "chunks with comments"],
)
async def test_framing_without_content_ends_the_connection(server, head, piece):
    """Parsing it would hold the event loop; nothing else ends it before the image's 10 s are over."""
    server.answer = flood(head, piece)
    fetcher = allowing(f"http://127.0.0.1:{server.port}", limits=FetchLimits(timeout_s=3600))
    with pytest.raises(BadRequest, match="cannot be fetched"):
        await fetched(fetcher, f"http://127.0.0.1:{server.port}/", most=1 << 20, seconds=3600)
    await server.ended.wait()


async def test_an_image_in_usual_chunks_arrives(server):
    body = b"".join(b"200\r\n" + bytes([number % 256]) * 512 + b"\r\n" for number in range(4000)) + b"0\r\n\r\n"
    server.answer = CHUNKED + body
    fetcher = allowing(f"http://127.0.0.1:{server.port}")
    assert len(await fetched(fetcher, f"http://127.0.0.1:{server.port}/", most=1 << 22)) == 4000 * 512


async def test_names_that_are_never_resolved_hold_up_no_other_image(server):
    asked = asyncio.Event()

    async def hanging(_host, _port):
        asked.set()
        await asyncio.Event().wait()

    url = f"http://127.0.0.1:{server.port}"
    fetcher = allowing(url, "https://slow.example", resolve=hanging, limits=FetchLimits(timeout_s=3600, at_once=1))
    slow = asyncio.create_task(fetched(fetcher, "https://slow.example/a.png", seconds=3600))
    await asked.wait()
    assert await fetched(fetcher, f"{url}/") == PNG
    slow.cancel()
    await asyncio.gather(slow, return_exceptions=True)


async def stalling(writer):
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: 5000\r\n\r\n\x89PNG")
    await writer.drain()
    await asyncio.Event().wait()


async def test_an_image_that_stops_arriving_is_given_up(server):
    server.answer = stalling
    fetcher = allowing(f"http://127.0.0.1:{server.port}", limits=FetchLimits(timeout_s=0.2))
    with pytest.raises(BadRequest, match=r"did not arrive from 127\.0\.0\.1 within 0\.2 s"):
        await fetched(fetcher, f"http://127.0.0.1:{server.port}/")
    with pytest.raises(DeadlineExceeded):
        await fetched(allowing(f"http://127.0.0.1:{server.port}"), f"http://127.0.0.1:{server.port}/", seconds=0.2)


async def test_those_who_wait_for_images_are_few_and_leave_no_place_taken(server):
    server.answer = stalling
    fetcher = allowing(f"http://127.0.0.1:{server.port}", limits=FetchLimits(at_once=1, queue=1))
    url = f"http://127.0.0.1:{server.port}/"
    first, second = (asyncio.create_task(fetched(fetcher, url)) for _ in range(2))
    while not server.requests:
        await asyncio.sleep(0.01)
    with pytest.raises(Overloaded, match="1 images wait"):
        await fetched(fetcher, url)
    for task in (first, second):
        task.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    server.answer = reply()
    assert await fetched(fetcher, url) == PNG


async def test_a_certificate_is_checked_against_the_name_in_the_url(tmp_path):
    authority = make_authority(tmp_path, "authority")
    cert, key = issue(tmp_path, authority, "images")
    served = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    served.load_cert_chain(cert, key)
    trusting = ssl.create_default_context(cafile=str(authority))

    async def resolve(_host, _port):
        return ["127.0.0.1"]

    async with Server().running(served) as server:
        # The certificate is for 127.0.0.1.
        named = (f"127.0.0.1:{server.port}", f"images.test:{server.port}")
        fetcher = allowing(*named, resolve=resolve, tls=trusting)
        assert await fetched(fetcher, f"https://127.0.0.1:{server.port}/") == PNG
        for refusing, host in ((fetcher, "images.test"), (allowing(*named), "127.0.0.1")):
            with pytest.raises(BadRequest, match=f"no secure connection to {host}"):
                await fetched(refusing, f"https://{host}:{server.port}/")


def chat(*urls):
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"model": SEER, "messages": [{"role": "user", "content": [{"type": "text", "text": "dark"}, *parts]}]}


class Seeing(Answering):
    """Keeps the sizes of the pictures that it was given."""

    def __init__(self, name, machine):
        super().__init__(name, machine)
        self.sizes = []

    async def run(self, job, result):
        if job.seen is not None:
            self.sizes += [(picture.width, picture.height) for picture in job.seen.pictures]
        async for event in super().run(job, result):
            yield event


@asynccontextmanager
async def serving(store, **settings):
    """The application with a model that sees; yields a client, the node and the engine."""
    engine = Seeing(SEER, Machine())
    async with application([seer(store, [placement(SEER, engine)])], NodeSettings(**settings)) as (client, node):
        node.manager.start()
        try:
            yield client, node, engine
        finally:
            await node.manager.stop()
            await node.services.parts.close()


@pytest.mark.usefixtures("store")
async def test_chats_see_images_by_url_once_a_reload_allows_it(store, server, caplog):
    caplog.set_level(logging.DEBUG)
    url = f"http://127.0.0.1:{server.port}/a.png?key=secret"
    async with serving(store) as (client, node, engine):

        async def send(*urls, path="/v1/chat/completions"):
            async with client.post(path, json=chat(*urls)) as answer:
                body = await answer.json()
                return answer.status, body.get("error", {}).get("message", "")

        status, message = await send(url)
        assert (status, "allow_image_hosts names no host" in message) == (400, True)
        node.adopt(
            NodeSettings(allow_image_hosts=(f"http://127.0.0.1:{server.port}",), max_image_body_bytes=len(PNG) * 2)
        )
        assert await send(url, url) == (200, "")
        assert engine.sizes == [(48, 40)] * 2
        status, message = await send(url, url, url)
        assert status == 413, "all images of a request together have the bound of a body"
        assert message.startswith("messages[0].content[3].image_url.url")
        server.answer = reply(body=b"no image at all")
        status, message = await send(url)
        assert (status, "not an image" in message) == (400, True)
        async with client.get("/metrics") as answer:
            lines = (await answer.text()).splitlines()
        # Three of two requests that were answered or had too many, and the text that is no image.
        assert {line for line in lines if line.startswith("npu_node_remote_image")} == {
            'npu_node_remote_images_total{outcome="fetched"} 5.0',
            'npu_node_remote_images_total{outcome="invalid_request"} 1.0',
            'npu_node_remote_images_total{outcome="payload_too_large"} 1.0',
            f"npu_node_remote_image_bytes_total {4 * len(PNG) + 15}.0",
        }
    assert "secret" not in caplog.text


async def test_without_the_edge_nothing_is_fetched():
    with pytest.raises(BadRequest, match="fetches no remote URLs"):
        await PictureDecoder().decode([Picture("", 0, WHERE, "https://images.test/")], None, time.monotonic() + 60)
