"""TLS between client and node, with an authority made for the test; keys of single nodes; proxies."""

import ssl
import subprocess

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from backend_client import CloudClient, CloudSettings, ConfigurationError, NPUClient, NPUUnavailableError
from tests.faults.scripted_node import ScriptedNode
from worker_node.app import make_app
from worker_node.core.errors import ConfigurationError as NodeConfigurationError
from worker_node.http.tls import ServerTls
from worker_node.server import Profile, running_node
from worker_node.settings import NodeSettings

# A node that serves no model.
NOTHING = Profile(lambda _: [], make_app, starts_parts=False)


# Python 3.13 and later accept nothing less of a certificate, nor of an authority without `keyUsage`.
_KEYS = "subjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\n"


def openssl(*arguments):
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def issue(directory, authority, name, subject="IP:127.0.0.1"):
    cert, key, request = (directory / f"{name}.{end}" for end in ("pem", "key", "csr"))
    names = directory / "names.txt"
    names.write_text(f"subjectAltName={subject}\n{_KEYS}")
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", key)
    openssl("req", *new_key, "-subj", f"/CN={name}", "-out", request)
    signed_by = ("-CA", authority, "-CAkey", authority.with_suffix(".key"), "-CAcreateserial")
    openssl("x509", "-req", "-in", request, *signed_by, "-days", "2", "-extfile", names, "-out", cert)
    return cert, key


def make_authority(directory, name):
    cert, key = directory / f"{name}.pem", directory / f"{name}.key"
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", key)
    usage = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")
    openssl("req", "-x509", *new_key, "-subj", f"/CN={name}", "-days", "2", *usage, "-out", cert)
    return cert


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pki")
    authority = make_authority(directory, "authority")
    return directory, authority, issue(directory, authority, "node"), issue(directory, authority, "client")


async def test_a_node_with_a_certificate_of_the_authority_is_used(pki):
    _, authority, (cert, key), _ = pki
    async with ScriptedNode().running(tls=ServerTls(cert, key, None).context) as node:
        assert node.url.startswith("https://")
        async with NPUClient([node.url], ca_file=authority) as client:
            assert await client.embed("text")
            assert await client.generate("prompt")
        context = ssl.create_default_context(cafile=authority)
        async with NPUClient([node.url], ssl_context=context) as client:
            assert await client.embed("text")
        async with NPUClient([node.url]) as client:
            with pytest.raises(NPUUnavailableError, match=r"its certificate cannot be verified: .*; see ca_file"):
                await client.embed("text", timeout=3)
    assert len(node.requests) == 3


async def test_the_node_itself_serves_tls(pki):
    _, authority, (cert, key), (client_cert, client_key) = pki
    settings = NodeSettings(port=0, tls_cert=cert, tls_key=key, tls_client_ca=authority)
    async with running_node(settings, NOTHING) as (_, url):
        assert url.startswith("https://")
        async with NPUClient([url], ca_file=authority, client_cert=client_cert, client_key=client_key) as client:
            [status] = await client.health()
        assert status.version is not None
        async with NPUClient([url], ca_file=authority) as client:
            [status] = await client.health()
        assert (status.status, status.version) == ("unreachable", None)
    with pytest.raises(NodeConfigurationError, match="tls_cert"):
        async with running_node(NodeSettings(port=0, tls_key=key), NOTHING):
            pass


def test_files_that_cannot_be_used_are_said_at_the_start(pki, tmp_path):
    _, authority, (cert, _), (_, client_key) = pki
    for wrong in ((tmp_path / "none", None, None), (cert, client_key, None), (cert, None, None)):
        with pytest.raises(NodeConfigurationError, match="tls_cert"):
            ServerTls(*wrong)
    for wrong, said in (
        ({"ca_file": tmp_path / "none"}, f"^ca_file {tmp_path}/none cannot be read: No such file or directory$"),
        ({"ca_file": client_key}, f"^ca_file {client_key} must be a PEM file of certificates$"),
        ({"client_cert": cert, "client_key": client_key}, "^client_cert and client_key must be PEM files, and a pair$"),
        ({"client_key": client_key}, "without client_cert"),
        ({"ca_file": authority, "ssl_context": ssl.create_default_context()}, "either"),
        ({"node_keys": {"ftp://a": "key"}}, "node_keys"),
        ({"node_keys": {"http://another:1": "key"}}, "node_keys"),
    ):
        with pytest.raises(ConfigurationError, match=said) as caught:
            NPUClient(["https://127.0.0.1:1"], **wrong)
        assert "key'" not in str(caught.value)


async def test_each_node_gets_its_own_key(pair):
    seen = {}

    async def note(request):
        seen[str(request.url.origin())] = request.headers.get("Authorization")

    for node in pair:
        node.respond = node.health_respond = note
    urls = [node.url for node in pair]
    async with NPUClient(urls, api_key="common", node_keys={urls[0] + "/": "own"}) as client:
        await client.health()
        for _ in range(20):
            await client.embed("text")
    assert seen == {urls[0]: "Bearer own", urls[1]: "Bearer common"}


@pytest.fixture
async def proxy():
    asked = []

    async def answer(request):
        asked.append(request.raw_path)
        return web.json_response({}, status=502)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app, host="127.0.0.1") as server:
        yield str(server.make_url("")).rstrip("/"), asked


async def test_proxies_of_the_environment_are_for_the_cloud_alone(scripted, cloud, proxy, monkeypatch):
    url, asked = proxy
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, url)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with NPUClient([scripted.url]) as client:
        assert await client.embed("text")
    assert not asked
    settings = CloudSettings(api_key="k", base_url=cloud.url, chat_model="chat")
    async with CloudClient(settings) as client:
        with pytest.raises(Exception, match="failed"):
            await client.generate("prompt", timeout=3)
    assert [cloud.url in target for target in asked] == [True]
    asked.clear()
    async with NPUClient([scripted.url], proxy=url) as client:
        with pytest.raises(NPUUnavailableError):
            await client.embed("text", timeout=2)
    assert asked
