"""Certificates and the authority of the clients (mutual TLS) are replaced in the middle of streams: real sockets."""

import asyncio
import os
import socket
import ssl
from contextlib import suppress

import aiohttp
import pytest

from tests.faults.client.test_tls import issue, make_authority
from tests.faults.engines.test_every_task_under_faults import serving
from tests.support.task_models import SEER, request
from tests.support.waiting import eventually
from worker_node.http.tls import ServerTls

pytestmark = pytest.mark.usefixtures("store")


class Authorities:
    """Two authorities of clients, a client of each, and the node's own certificates."""

    def __init__(self, directory):
        self.directory = directory
        self.node = make_authority(directory, "node-authority")
        self.certificates = [issue(directory, self.node, f"node-{number}") for number in range(3)]
        self.own = [make_authority(directory, f"clients-{name}") for name in "ab"]
        self.clients = [issue(directory, own, f"client-{own.stem}") for own in self.own]
        self.cert, self.key, self.client_ca = (directory / name for name in ("served.pem", "served.key", "ca.pem"))

    def serve(self, number, *admitted):
        """Replace the files by the certificate of that number and the authorities that are admitted."""
        cert, key = self.certificates[number]
        put(self.key, key.read_bytes())
        put(self.cert, cert.read_bytes())
        put(self.client_ca, b"".join(self.own[index].read_bytes() for index in admitted))

    def context(self, index):
        context = ssl.create_default_context(cafile=self.node)
        context.load_cert_chain(*self.clients[index])
        return context

    def connector(self, index, **more):
        return aiohttp.TCPConnector(ssl=self.context(index), **more)

    async def becomes(self, url, index, *, admitted):
        async with asyncio.timeout(60):
            while await self.admits(url, index) is not admitted:
                await asyncio.sleep(0.01)

    async def admits(self, url, index):
        async with aiohttp.ClientSession(connector=self.connector(index, force_close=True)) as session:
            try:
                async with session.get(url + "/health") as reply:
                    return reply.status == 200
            except aiohttp.ClientError:
                return False


def put(path, data):
    """Write with a time of change of its own."""
    path.write_bytes(data)
    os.utime(path)


async def test_an_authority_of_clients_is_replaced_in_the_middle_of_streams(store, tmp_path, monkeypatch):
    monkeypatch.setattr("worker_node.http.tls._LOOK_EVERY_S", 0.05)
    tls = Authorities(tmp_path)
    tls.serve(0, 0)
    settings = {"tls_cert": tls.cert, "tls_key": tls.key, "tls_client_ca": tls.client_ca}
    tokens = [0, 0]

    async def follow(session, url, index):
        path, body = request(SEER, "word " * 1500, stream=True)
        body["json"]["max_tokens"] = 2000
        async with session.post(url + path, **body) as reply:
            assert reply.status == 200
            async for line in reply.content:
                assert b"error" not in line
                tokens[index] += line.startswith(b"data: {")

    async def goes_on(*indexes):
        seen = list(tokens)
        await eventually(lambda: all(tokens[index] > seen[index] for index in indexes))

    async with (
        serving(store, names=(SEER,), **settings) as (_, _, url),
        aiohttp.ClientSession(connector=tls.connector(0)) as first,
        aiohttp.ClientSession(connector=tls.connector(1)) as second,
    ):
        assert await tls.admits(url, 0)
        assert not await tls.admits(url, 1)
        streams = [asyncio.create_task(follow(first, url, 0))]
        await goes_on(0)
        # Both are admitted for a time, with another certificate of the node.
        tls.serve(1, 0, 1)
        await tls.becomes(url, 1, admitted=True)
        assert await tls.admits(url, 0)
        streams.append(asyncio.create_task(follow(second, url, 1)))
        await goes_on(0, 1)
        # The first authority is withdrawn: its clients are admitted no more, and what they began goes on.
        tls.serve(2, 1)
        await tls.becomes(url, 0, admitted=False)
        assert await tls.admits(url, 1)
        await goes_on(0, 1)
        # Files that cannot be used change nothing.
        put(tls.client_ca, b"no certificate")
        await asyncio.sleep(0.2)
        assert await tls.admits(url, 1)
        assert not await tls.admits(url, 0)
        await goes_on(0, 1)
        assert not any(stream.done() for stream in streams)
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


async def test_a_session_of_a_withdrawn_authority_is_not_resumed(tmp_path):
    tls = Authorities(tmp_path)
    tls.serve(0, 0)
    node = ServerTls(tls.cert, tls.key, tls.client_ca)

    async def echo(reader, writer):
        writer.write(await reader.readline())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0, ssl=node.context)
    host, port = server.sockets[0].getsockname()
    context = tls.context(0)

    def ask(session=None):
        """In a thread: asyncio offers no sessions."""
        with (
            socket.create_connection((host, port)) as plain,
            context.wrap_socket(plain, server_hostname=host, session=session) as secure,
        ):
            secure.sendall(b"hello\n")
            return secure.recv(100), secure.session

    try:
        answer, session = await asyncio.to_thread(ask)
        assert answer == b"hello\n"
        assert (await asyncio.to_thread(ask, session))[0] == b"hello\n"
        tls.serve(0, 1)
        assert node.reload_if_changed()
        for known in (session, None):
            with suppress(ssl.SSLError, ConnectionError):
                answer, _ = await asyncio.to_thread(ask, known)
                assert answer == b"", "closed without a word"
    finally:
        server.close()
        await server.wait_closed()
