"""Recoveries of the NPU, as the kernel announces them."""

import asyncio
import errno
import socket
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.support.waiting import eventually
from worker_node import server
from worker_node.core.types import Device
from worker_node.devices import recovery
from worker_node.settings import NodeSettings

# Linux alone announces them.
pytestmark = pytest.mark.linux
RECOVERY = b"change@/devices/pci0000:00/0000:00:0b.0\0ACTION=change\0IVPU_PM_EVENT=IVPU_RECOVER\0SEQNUM=7\0"


def datagrams():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    ours.setblocking(False)
    return ours, theirs


@pytest.mark.parametrize(
    ("announced", "count"),
    [
        ([RECOVERY], 1),
        ([RECOVERY, RECOVERY], 2),
        ([RECOVERY.replace(b"RECOVER", b"SUSPEND"), b"", b"\xff" * 8000, b"X" + RECOVERY[:-20]], 0),
        ([b"add@/x\0OTHER_IVPU_PM_EVENT=IVPU_RECOVER\0"], 0),
    ],
)
async def test_each_recovery_is_told_and_nothing_else(announced, count):
    ours, kernels = datagrams()
    told = []
    with kernels, recovery.listening(ours, lambda: told.append(1)):
        for content in announced:
            kernels.send(content)
        kernels.send(RECOVERY)
        await eventually(lambda: len(told) > count)
    assert len(told) == count + 1
    assert ours.fileno() == -1


async def test_an_announcement_is_heard_before_the_result_that_arrived_with_it_is_used():
    ours, kernels = datagrams()
    results, engine = datagrams()
    told = []
    loop = asyncio.get_running_loop()
    with kernels, results, engine, recovery.listening(ours, lambda: told.append(1)):
        waiting = asyncio.create_task(loop.sock_recv(results, 10))
        await asyncio.sleep(0)
        engine.send(b"result")
        kernels.send(RECOVERY)
        assert await waiting == b"result"
        assert told == [1]


async def test_announcements_that_were_lost_count_as_a_recovery():
    """The kernel drops them, and says so once, when nobody has read them for too long."""

    class Flooded(socket.socket):
        lost = True

        def recvfrom(self, *size):
            if self.lost:
                self.lost = False
                raise OSError(errno.ENOBUFS, "No buffer space available")
            return super().recvfrom(*size)

    one, kernels = datagrams()
    ours = Flooded(fileno=one.detach())
    ours.setblocking(False)
    told = []
    with kernels, recovery.listening(ours, lambda: told.append(1)):
        kernels.send(b"add@/devices/x\0")
        await eventually(lambda: told)
    assert told == [1]


def test_a_machine_without_such_announcements_does_without(monkeypatch):
    monkeypatch.delattr(socket, "AF_NETLINK", raising=False)
    assert recovery.uevents() is None


async def test_another_process_cannot_announce_a_recovery():
    source = recovery.uevents()
    if source is None:
        pytest.skip("this process may not listen to the kernel")
    told = []
    with (
        recovery.listening(source, lambda: told.append(1)),
        socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 15) as liar,
    ):
        try:
            liar.bind((0, 0))
            liar.sendto(RECOVERY, (source.getsockname()[0], 0))
        except OSError:
            pass  # it may not even send
        await asyncio.sleep(0.1)
    assert not told


async def test_a_node_counts_a_recovery_and_its_engines_on_the_npu_hear_of_it(monkeypatch):
    ours, kernels = datagrams()
    monkeypatch.setattr(server, "uevents", lambda: ours)
    heard = asyncio.Event()
    npu = SimpleNamespace(device=Device.NPU, engine=SimpleNamespace(device_recovered=heard.set))
    cpu = SimpleNamespace(device=Device.CPU, engine=None)
    with kernels:
        async with server.hosted_node(NodeSettings(), server.Profile(lambda _machine: [], server.make_app)) as node:
            manager = SimpleNamespace(models=[SimpleNamespace(placements=[cpu, npu])])
            node.services = replace(node.services, manager=manager)
            kernels.send(RECOVERY)
            async with asyncio.timeout(30):
                await heard.wait()
            assert node.telemetry.registry.get_sample_value("npu_node_npu_recoveries_total") == 1
    assert ours.fileno() == -1
