"""Recoveries of the NPU, as the kernel announces them."""

import asyncio
import socket

import pytest

from worker_node.devices import recovery

RECOVERY = b"change@/devices/pci0000:00/0000:00:0b.0\0ACTION=change\0IVPU_PM_EVENT=IVPU_RECOVER\0SEQNUM=7\0"


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
    ours, kernels = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    ours.setblocking(False)
    told = []
    watching = asyncio.create_task(recovery.watch(ours, lambda: told.append(1)))
    with kernels:
        for content in announced:
            kernels.send(content)
        kernels.send(RECOVERY)
        async with asyncio.timeout(10):
            while len(told) <= count:
                await asyncio.sleep(0)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert len(told) == count + 1
    assert ours.fileno() == -1


def test_a_machine_without_such_announcements_does_without(monkeypatch):
    monkeypatch.delattr(socket, "AF_NETLINK", raising=False)
    assert recovery.uevents() is None


@pytest.mark.skipif(not hasattr(socket, "AF_NETLINK"), reason="Linux alone has netlink")
async def test_another_process_cannot_announce_a_recovery():
    source = recovery.uevents()
    if source is None:
        pytest.skip("this process may not listen to the kernel")
    told = []
    watching = asyncio.create_task(recovery.watch(source, lambda: told.append(1)))
    await asyncio.sleep(0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 15) as liar:
        try:
            liar.bind((0, 0))
            liar.sendto(RECOVERY, (source.getsockname()[0], 0))
        except OSError:
            pass  # it may not even send
    await asyncio.sleep(0.1)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert not told
