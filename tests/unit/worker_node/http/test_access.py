"""Who may call the node: hosts and origins."""

import asyncio
import contextlib
from unittest.mock import Mock

import pytest
from aiohttp.test_utils import make_mocked_request

from tests.support.application import application
from worker_node.core.errors import Forbidden
from worker_node.http.access import Access
from worker_node.settings import NodeSettings

LIVE = "/health/live"


@contextlib.asynccontextmanager
async def serving(**settings):
    """Sends raw requests to a node; returns status and headers."""
    async with application(settings=NodeSettings(**{"api_keys": ()} | settings)) as (client, _):

        async def ask(*lines, method="GET", target=LIVE, version="1.1"):
            reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
            head = [f"{method} {target} HTTP/{version}", *lines, "Content-Length: 0", "Connection: close", "", ""]
            writer.write("\r\n".join(head).replace("PORT", str(client.port)).encode())
            answer = (await reader.read()).decode()
            writer.close()
            await writer.wait_closed()
            status, *fields = answer.partition("\r\n\r\n")[0].split("\r\n")
            return int(status.split()[1]), {n.lower(): v for n, _, v in (field.partition(": ") for field in fields)}

        yield ask


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (["Host: 127.0.0.1:PORT"], 200),
        (["Host: localhost:PORT"], 200),
        (["Host: LOCALHOST."], 200),
        (["Host: [::1]:8081"], 200),
        (["Host: 127.0.0.1:PORT", "Origin: http://127.0.0.1:PORT"], 200),
        # A page whose own name points here: DNS rebinding. Its origin is then the same as its host.
        (["Host: evil.example:PORT"], 403),
        (["Host: evil.example:PORT", "Origin: http://evil.example:PORT"], 403),
        (["Host: localhost.evil.example"], 403),
        (["Host: 10.0.0.1"], 403),
        (["Host: localhost:PORT", "Origin: https://evil.example"], 403),
        (["Host: localhost:PORT", "Origin: null"], 403),
        (["Host: localhost:PORT", "Origin: http://localhost:1"], 403),
        (["Host: localhost:PORT", "Origin: http://localhost:PORT@evil.example"], 403),
        (["Host: localhost:PORT", "Origin: http://localhost:PORT", "Origin: https://evil.example"], 400),
        ([], 400),
        (["Host: localhost", "Host: evil.example"], 400),
        (["Host: localhost/evil"], 400),
        (["Host: "], 400),
        (["Host: localhost, evil.example"], 400),
    ],
)
async def test_a_node_without_keys_listens_to_its_own_names_and_pages_only(lines, status):
    async with serving() as ask:
        assert (await ask(*lines))[0] == status


async def test_the_target_of_a_request_may_be_a_whole_url_of_this_node_only():
    async with serving() as ask:
        assert (await ask("Host: localhost", target=f"http://localhost{LIVE}"))[0] == 200
        assert (await ask("Host: localhost", target=f"http://evil.example{LIVE}"))[0] == 400
        assert (await ask("Host: evil.example", target=f"http://evil.example{LIVE}"))[0] == 403
        assert (await ask(target=f"http://evil.example{LIVE}", version="1.0"))[0] == 400
        assert (await ask(version="0.9"))[0] == 400
        # Load balancers ask in HTTP/1.0 without a name; no browser does.
        assert (await ask(version="1.0"))[0] == 200


async def test_allowed_hosts_are_names_of_the_node():
    async with serving(allowed_hosts=("npu.example", "*.lan")) as ask:
        for host, status in (
            ("npu.example", 200),
            ("NPU.Example:1", 200),
            ("a.lan", 200),
            ("lan", 403),
            ("x.npu.example", 403),
        ):
            assert (await ask(f"Host: {host}"))[0] == status, host
    async with serving(allowed_hosts=("*",)) as ask:
        assert (await ask("Host: any.example"))[0] == 200


@pytest.mark.parametrize(
    ("bind", "host", "accepted"),
    [
        ("0.0.0.0", "192.0.2.7:8081", True),  # noqa: S104  (nothing is bound)
        ("0.0.0.0", "192.0.2.8:8081", False),  # noqa: S104
        ("::", "192.0.2.7", True),
        ("192.0.2.9", "192.0.2.7", False),
    ],
)
def test_a_node_bound_to_every_address_has_the_one_that_was_used_for_a_name(bind, host, accepted):
    transport = Mock()
    transport.get_extra_info.side_effect = {"sockname": ("::ffff:192.0.2.7", 8081, 0, 0)}.get
    request = make_mocked_request("GET", "/", headers={"Host": host}, transport=transport)
    with contextlib.nullcontext() if accepted else pytest.raises(Forbidden):
        Access(NodeSettings(host=bind, api_keys=(), allow_unauthenticated=True)).check_origin(request)


async def test_with_keys_any_name_will_do_but_not_two():
    async with serving(api_keys=("secret-0123456789",)) as ask:
        assert (await ask("Host: npu.example", "Origin: https://app.example"))[0] == 200
        assert (await ask("Host: a", "Host: b"))[0] == 400


@pytest.mark.parametrize(
    ("origin", "opens"),
    [
        ("http://localhost:3000", True),
        ("HTTP://LOCALHOST:5173", True),
        ("http://localhost", True),
        ("http://[::1]:3000", True),
        ("https://localhost:3000", False),
        ("http://localhost.evil.example:3000", False),
        ("http://localhost:3000@evil.example", False),
        ("null", False),
    ],
)
def test_an_origin_may_stand_for_all_ports_of_its_host(origin, opens):
    settings = NodeSettings(cors_origins=("http://localhost:*", "http://[::1]:*"), api_keys=())
    assert Access(settings).opens_to(origin) == opens


@pytest.mark.parametrize(
    "origin", ["https://*.example", "app://*", "localhost", "http://a/b", "http://a:x", "http://a:*b"]
)
def test_an_origin_that_no_page_can_have_stops_the_node(origin):
    with pytest.raises(ValueError, match=r"write https://app\.example \(scheme, host, port\), http://localhost:\*"):
        NodeSettings(cors_origins=(origin,))


async def test_cors_origins_may_send_and_read():
    async with serving(cors_origins=("https://app.example",)) as ask:
        for target, status in ((LIVE, 200), ("/nowhere", 404)):
            got, headers = await ask("Host: localhost", "Origin: https://app.example", target=target)
            assert (got, headers["access-control-allow-origin"]) == (status, "https://app.example")
            assert headers["vary"] == "Origin"
        got, headers = await ask(
            "Host: localhost",
            "Origin: https://app.example",
            "Access-Control-Request-Method: POST",
            "Access-Control-Request-Headers: authorization,content-type",
            method="OPTIONS",
        )
        assert (got, headers["access-control-allow-headers"]) == (204, "authorization,content-type")
        got, headers = await ask("Host: localhost", "Origin: https://evil.example")
        assert got == 403
        assert "access-control-allow-origin" not in headers
