"""Nodes that take no connection."""

import asyncio
import contextlib
import socket

import pytest

from backend_client import ClientOptions
from backend_client.errors import NodeUnreachable
from backend_client.http.tls import Identity
from backend_client.http.transport import HttpTransport
from backend_client.options import Timeouts

CONNECT_S = 0.2


async def test_a_node_that_takes_no_connection_is_unreachable_all_the_same():
    transport = HttpTransport(Identity(), ClientOptions(timeouts=Timeouts(connect=CONNECT_S)))
    with contextlib.ExitStack() as stack:
        deaf = stack.enter_context(socket.socket())
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        # Fill its backlog, so that the kernel answers no further connection.
        for _ in range(4):
            other = stack.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(deaf.getsockname())
        try:
            with pytest.raises(NodeUnreachable, match="no answer in time"):
                await asyncio.wait_for(transport.health(f"http://127.0.0.1:{deaf.getsockname()[1]}"), 30)
        finally:
            await transport.close()
