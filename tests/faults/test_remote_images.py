"""Images by URL, over real sockets on loopback: a scripted server that misbehaves, and a resolver that lies."""

import asyncio
import ssl

import pytest

from tests.faults.client.test_tls import issue, make_authority
from tests.faults.image_server import PNG, WHERE, Server, allowing, fetched, reply
from worker_node.core.errors import BadRequest, DeadlineExceeded, Overloaded, PayloadTooLarge
from worker_node.tasks.generate.http.remote_images import FetchLimits, ImageFetcher


@pytest.fixture
async def server():
    async with Server().running() as running:
        yield running


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
