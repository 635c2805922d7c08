"""Nodes that are found by name or by file, come, go and change their addresses."""

import asyncio
import socket
import threading

import dns.message
import dns.rrset
import pytest
from dns import asyncresolver

from backend_client import ClientOptions, NPUClient, NPUUnavailableError
from backend_client.fleet import runtime
from backend_client.fleet.runtime import Follower, find_nodes, srv_nodes
from backend_client.http.addresses import NodeAddress
from backend_client.lifetime import DaemonThread

QUICK = ClientOptions(discovery_interval=0.02)


async def until(condition):
    while not condition():
        await asyncio.sleep(0.01)


def urls(client):
    return [node.url for node in client.status()]


async def test_a_file_is_read_again_when_it_changes(pair, tmp_path):
    listed = tmp_path / "nodes"
    listed.write_text(f"# the first\n{pair[0].url}/  # with a slash\n\n")
    async with NPUClient([listed.as_uri()], options=QUICK) as client:
        assert (await client.embed_result("text")).node == pair[0].url
        listed.write_text(f"{pair[0].url}\n{pair[1].url}\n")
        await until(lambda: len(urls(client)) == 2)
        listed.write_text(f"{pair[1].url}\n")
        await until(lambda: urls(client) == [pair[1].url])
        assert (await client.embed_result("text")).node == pair[1].url
        listed.unlink()  # a file that is being replaced is not a fleet without nodes
        await asyncio.sleep(0.1)  # it is read again meanwhile; nothing shows that nothing changes
        assert urls(client) == [pair[1].url]


def resolving(monkeypatch, addresses, name="npu.internal"):
    real = socket.getaddrinfo

    def getaddrinfo(host, port, *args, **more):
        if host != name:
            return real(host, port, *args, **more)
        if isinstance(addresses, threading.Event):
            addresses.wait(60)
            raise socket.gaierror(socket.EAI_AGAIN, "no answer")
        return [
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", (address, port, 0, 0))
            if ":" in address
            else (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))
            for address in addresses
        ]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        (["10.0.0.2", "10.0.0.1", "10.0.0.1"], ["http://10.0.0.1:8081", "http://10.0.0.2:8081"]),
        (["fd00::1", "10.0.0.1"], ["http://[fd00::1]:8081"]),
        (["10.0.0.1", "fd00::1"], ["http://10.0.0.1:8081"]),
        (["fd00::1", "fd00::2", "10.0.0.1", "10.0.0.2"], ["http://[fd00::1]:8081", "http://[fd00::2]:8081"]),
        (["10.0.0.1", "10.0.0.2", "fd00::1"], ["http://10.0.0.1:8081", "http://10.0.0.2:8081"]),
        ([], []),
    ],
)
async def test_a_name_is_a_node_for_each_host(monkeypatch, addresses, expected):
    resolving(monkeypatch, addresses)
    assert await find_nodes(NodeAddress("dns", "npu.internal", 8081), DaemonThread("resolve")) == expected


@pytest.fixture
def hanging(monkeypatch):
    released = threading.Event()
    resolving(monkeypatch, released)
    yield
    released.set()


async def test_a_resolver_that_hangs_is_named_and_not_waited_for(hanging):  # takes the 2 s that a source gets
    async with asyncio.timeout(30), NPUClient(["dns://npu.internal:8081"]) as client:
        with pytest.raises(NPUUnavailableError, match=r"dns://npu\.internal:8081 did not answer within 2 s"):
            await client.embed("text")


class _NameServer(asyncio.DatagramProtocol):
    """Answers every question with the SRV records it was given."""

    def __init__(self, records):
        self.records = records

    def connection_made(self, transport):
        self.transport = transport

    def datagram_received(self, data, address):
        query = dns.message.from_wire(data)
        reply = dns.message.make_response(query)
        if self.records:
            name = query.question[0].name
            reply.answer.append(dns.rrset.from_text(name, 5, "IN", "SRV", *self.records))
        self.transport.sendto(reply.to_wire(), address)


async def test_srv_records_name_hosts_and_ports():
    records = ["0 0 8081 node-1.internal.", "0 0 9090 node-2.internal."]
    transport, server = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: _NameServer(records), local_addr=("127.0.0.1", 0)
    )
    try:
        port = transport.get_extra_info("sockname")[1]
        resolver = asyncresolver.Resolver(configure=False)
        resolver.nameservers, resolver.port = ["127.0.0.1"], port
        address = NodeAddress("srv", "_npu._tcp.internal")
        assert await srv_nodes(address, resolver) == ["http://node-1.internal:8081", "http://node-2.internal:9090"]
        server.records = []
        with pytest.raises(OSError, match="no SRV records"):
            await srv_nodes(address, resolver)
    finally:
        transport.close()


@pytest.mark.parametrize(
    ("answers", "members"),
    [
        pytest.param([["b"], OSError("down"), ["b"]], ["ab", "ab", "ab"], id="failed"),
        pytest.param([["b", "c"], [], [], ["b", "c"]], ["abc", "abc", "abc", "abc"], id="empty"),
        pytest.param([["b", "c"], ["b"], ["b", "c"], ["c"], ["b", "c"]], ["abc"] * 5, id="part"),
        pytest.param([["b", "c"], ["b"], ["b"]], ["abc", "abc", "ab"], id="removed"),
        pytest.param([["b"], ["c"], ["c"]], ["ab", "abc", "ac"], id="replaced"),
        pytest.param(
            [["b"], [" not a url"], ["c"], OSError("down"), ["c"]], ["ab", "ab", "abc", "abc", "ac"], id="garbage"
        ),
        pytest.param([["b"], ["c"], [], ["c"]], ["ab", "abc", "abc", "ac"], id="empty between"),
    ],
)
async def test_a_node_leaves_only_when_its_source_leaves_it_out_twice_and_fixed_nodes_stay(
    answers, members, monkeypatch
):
    answers = list(answers)

    async def find(*_):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return [name if " " in name else f"http://{name}:1" for name in answer]

    monkeypatch.setattr(runtime, "find_nodes", find)
    fleet = {"http://a:1"}
    follower = Follower([NodeAddress("dns", "b", 1)], ["http://a:1"], add=fleet.update, remove=fleet.difference_update)
    seen = []
    while answers:
        await follower.look()
        seen.append("".join(sorted(url[7] for url in fleet)))
    assert seen == members
