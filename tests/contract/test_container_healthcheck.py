"""The health check of the container image, against nodes that serve http, https, and https for certificates only."""

import asyncio
import os
import re
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.faults.client.test_tls import NOTHING, issue, make_authority
from worker_node.http.tls import ServerTls
from worker_node.server import running_node
from worker_node.settings import NodeSettings

CONTAINER = Path(__file__).parents[2] / "config" / "container"
IMAGE = (CONTAINER / "Containerfile").read_text()


async def check(port, **environment):
    """The exit status of the health check and what it says, with the command that the image has."""
    (program,) = re.findall(r'^HEALTHCHECK .*CMD \["python3", "/opt/npu-node/(\w+\.py)"\]$', IMAGE, re.MULTILINE)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NPU_")}
    # A proxy of the environment is not asked.
    proxies = {"http_proxy": "http://127.0.0.1:1", "https_proxy": "http://127.0.0.1:1"}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, CONTAINER / program),
        # NPU_NODE_HOST as the image has it.
        env={**kept, **proxies, "NPU_NODE_HOST": "0.0.0.0", "NPU_NODE_PORT": str(port), **environment},  # noqa: S104
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    return process.returncode, said.decode().strip()


@asynccontextmanager
async def node(**settings):
    async with running_node(NodeSettings(port=0, **settings), NOTHING) as (_, url):
        yield int(url.rsplit(":", 1)[1])


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    """An authority, its certificates for a node and a caller, and a certificate of another authority."""
    directory = tmp_path_factory.mktemp("pki")
    authority, stranger = make_authority(directory, "authority"), make_authority(directory, "stranger")
    node, caller = issue(directory, authority, "node"), issue(directory, authority, "caller")
    return authority, node, caller, issue(directory, stranger, "foreign")


def shown(certificate):
    cert, key = certificate
    return {"NPU_CLIENT_CLIENT_CERT": str(cert), "NPU_CLIENT_CLIENT_KEY": str(key)}


async def test_a_node_that_serves_http_is_healthy_until_it_ends():
    async with node() as port:
        assert await check(port) == (0, "healthy")
    status, said = await check(port)
    assert status == 1
    assert said.startswith(f"no answer at 127.0.0.1:{port}")


async def test_a_node_with_a_certificate_is_healthy_wherever_it_was_set(pki, caplog):
    _, (cert, key), _, _ = pki
    async with node(tls_cert=cert, tls_key=key) as port:
        assert await check(port, NPU_NODE_TLS_CERT=str(cert)) == (0, "healthy")
        assert not caplog.records
        # By a settings file, which the check does not read.
        assert await check(port) == (0, "healthy")
        assert not caplog.records
    status, said = await check(port, NPU_NODE_TLS_CERT=str(cert))
    assert status == 1
    assert said.startswith("no answer")


@pytest.mark.parametrize("caller", ["own", "foreign", "none"])
async def test_a_node_that_admits_certificates_only_is_healthy_whichever_is_shown(pki, caller):
    authority, (cert, key), own, foreign = pki
    certificate = {"own": shown(own), "foreign": shown(foreign), "none": {}}[caller]
    async with node(tls_cert=cert, tls_key=key, tls_client_ca=authority) as port:
        assert await check(port, NPU_NODE_TLS_CERT=str(cert), **certificate) == (0, "healthy")
        assert await check(port, **certificate) == (0, "healthy")
    assert (await check(port, NPU_NODE_TLS_CERT=str(cert), **certificate))[0] == 1


@asynccontextmanager
async def draining(context=None):
    async def not_ready(_):
        return web.json_response({"status": "draining"}, status=503)

    app = web.Application()
    app.router.add_get("/health/ready", not_ready)
    server = TestServer(app)
    await server.start_server(ssl=context)
    try:
        yield server.port
    finally:
        await server.close()


async def test_a_node_that_is_not_ready_is_unhealthy_by_http_and_by_https_with_a_certificate(pki):
    authority, (cert, key), own, _ = pki
    unhealthy = (1, 'status 503: {"status": "draining"}')
    async with draining() as port:
        assert await check(port) == unhealthy
    async with draining(ServerTls(cert, key, authority).context) as port:
        assert await check(port, NPU_NODE_TLS_CERT=str(cert), **shown(own)) == unhealthy


async def test_what_speaks_neither_is_unhealthy():
    async def refuse(reader, writer):
        writer.write(b"220 mail.example ESMTP\r\n")
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        for environment in ({}, {"NPU_NODE_TLS_CERT": "x"}):
            status, said = await check(port, **environment)
            assert (status, "http: " in said, "https: " in said) == (1, True, True)


def test_the_image_has_what_it_copies():
    """What .containerignore and .dockerignore do not let through fails the build, minutes later."""
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", IMAGE, re.MULTILINE)
    sources = {source for line in copied for source in line.split()}
    assert "config/container/healthcheck.py" in sources
    for name in (".containerignore", ".dockerignore"):
        admitted = {line[1:] for line in (CONTAINER.parents[1] / name).read_text().splitlines() if line[:1] == "!"}
        assert sources <= admitted, name
