"""What NPUClient.embed costs over a bare aiohttp POST of the same bytes, and whether memory stays flat.

One text, one caller, one kept-alive connection, both ways in turns within one process, each as often first as second.
Against the node, which is the figure that callers see; and against a process that answers at once, so that nothing
hides behind inference: what is left is the client alone. The last line of each part is the one to read: the median over
the pairs of turns.
"""

import asyncio
import contextlib
import gc
import json
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection

import aiohttp
import psutil

from backend_client import NPUClient
from benchmarks.harness import Figure, show, to_json

TEXT = "The quick brown fox jumps over the lazy dog."
MODEL = "all-minilm-l6-v2"
DIMENSIONS = 384
# At most so many times what a call of bare aiohttp takes: by the clock against a node, in processor time against the
# server that answers at once.
AGAINST_A_NODE, AGAINST_AN_INSTANT_SERVER = 1.1, 1.5
HEALTH = {
    "status": "ready",
    "models": [
        {
            "id": MODEL,
            "kind": "embedding",
            "state": "ready",
            "placements": ["CPU"],
            "space": "s",
            "dimensions": DIMENSIONS,
        }
    ],
}


class _Server(asyncio.Protocol):
    """As little of an HTTP server as will do: a fixed reply to each request."""

    def __init__(self) -> None:
        self.buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while True:
            head, separator, rest = self.buffer.partition(b"\r\n\r\n")
            length = next(
                (
                    int(line.split(b":")[1])
                    for line in head.split(b"\r\n")
                    if line.lower().startswith(b"content-length")
                ),
                0,
            )
            if not separator or len(rest) < length:
                return
            self.buffer = rest[length:]
            self.transport.write(_HEALTH if head.startswith(b"GET") else _VECTOR)


def _reply(content_type: str, body: bytes, *headers: str) -> bytes:
    head = "\r\n".join(
        ["HTTP/1.1 200 OK", f"Content-Type: {content_type}", f"Content-Length: {len(body)}", *headers, "", ""]
    )
    return head.encode() + body


_HEALTH = _reply("application/json", json.dumps(HEALTH).encode())
_VECTOR = _reply(
    "application/octet-stream",
    b"\0\0\0\x3f" * DIMENSIONS,
    f"X-Shape: 1,{DIMENSIONS}",
    "X-Space: s",
    f"X-Model: {MODEL}",
    "X-NPU-Node-Device: CPU",
    "X-NPU-Node-Route-Reason: preferred",
    "X-NPU-Node-Token-Count: 12",
    "X-Request-ID: req_0123456789abcdef01234567",
)


def _serve(ready: Connection) -> None:
    async def serve() -> None:
        server = await asyncio.get_running_loop().create_server(_Server, "127.0.0.1", 0)
        ready.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(serve())


@contextlib.contextmanager
def instant_server():
    """The URL of a process that answers every request at once."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(there,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{here.recv()}"
    finally:
        process.terminate()
        process.join()


def _bare(session, url):
    body = json.dumps({"texts": [TEXT], "model": MODEL}, separators=(",", ":")).encode()
    headers = {
        "Content-Type": "application/json",
        "Accept": "application/octet-stream",
        "X-Request-ID": "req_0123456789abcdef01234567",
        "X-Request-Timeout-Ms": "29999",
    }

    async def post():
        async with session.post(f"{url}/embeddings", data=body, headers=headers) as response:
            await response.read()

    return post


async def _measured(call, calls):
    """Microseconds a call, by the clock and of this process's processor time."""
    clock, processor = time.perf_counter(), time.process_time()
    for _ in range(calls):
        await call()
    return (time.perf_counter() - clock) * 1e6 / calls, (time.process_time() - processor) * 1e6 / calls


async def _compare(title, url, calls, rounds, *, by_clock=None, by_processor=None):
    async with aiohttp.ClientSession() as session, NPUClient([url]) as client:
        bare = _bare(session, url)
        pairs = []
        for number in range(-1, rounds):
            ways = [bare, lambda: client.embed(TEXT)]
            turns = [await _measured(way, calls) for way in (ways if number % 2 else ways[::-1])]
            if number >= 0:
                pairs.append(turns if number % 2 else turns[::-1])
    plain, full = zip(*pairs, strict=True)
    rates = [[1e6 / clock for clock, _ in way] for way in (plain, full)]
    costs = [[processor for _, processor in way] for way in (plain, full)]
    figures = [
        Figure("bare aiohttp POST", "calls/s", rates[0]),
        Figure("NPUClient.embed", "calls/s", rates[1], _ratios(rates)),
        Figure("bare aiohttp POST, the caller's processor time", "µs a call", costs[0]),
        Figure("NPUClient.embed, the caller's processor time", "µs a call", costs[1], _ratios(costs)),
    ]
    show(f"Client overhead against {title}", figures)
    slower = statistics.median(full[0] / plain[0] for plain, full in pairs)
    dearer = statistics.median(_ratios(costs))
    told = f"{slower:.3f} by the clock{_wanted(slower, by_clock)}"
    told += f", {dearer:.3f} in processor time{_wanted(dearer, by_processor)}"
    print(f"  A call ÷ bare aiohttp, the median of {len(pairs)} pairs: {told}\n")
    return figures


def _wanted(found, most):
    return "" if most is None else f" (at most {most} wanted: {'reached' if found <= most else 'MISSED'})"


def _ratios(ways):
    return [full / plain for plain, full in zip(*ways, strict=True)]


async def _memory(url, calls):
    process = psutil.Process()
    sizes = []
    async with NPUClient([url]) as client:
        for _ in range(10):
            await _measured(lambda: client.embed(TEXT), calls // 10)
            gc.collect()
            sizes.append(process.memory_info().rss / 1024)
    figures = [
        Figure(f"resident memory after {calls // 10} calls", "kB", sizes[:1]),
        Figure(f"resident memory after {calls} calls", "kB", sizes[-1:], [sizes[-1] / sizes[0]]),
    ]
    show("Client memory", figures)
    return figures


async def run(node, _store, quick):
    """Measure and print; return the figures."""
    # Many short turns: shared machines change their speed within seconds.
    rounds = 12 if quick else 80
    figures = await _compare("the node", node.url, 20, rounds, by_clock=AGAINST_A_NODE)
    with instant_server() as url:
        figures += await _compare(
            "a server that answers at once", url, 100, rounds, by_processor=AGAINST_AN_INSTANT_SERVER
        )
        figures += await _memory(url, 10_000 if quick else 100_000)
    return to_json(figures)
