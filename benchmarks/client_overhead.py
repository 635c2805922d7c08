"""What NPUClient.embed costs over a bare aiohttp POST of the same bytes, and whether memory stays flat.

    python -m benchmarks.client_overhead [--calls 2000] [--rounds 9] [--memory-calls 100000] [--node URL]

One text, one caller, one kept-alive connection. The server is a process of its own that answers at once with 384
float32 (so the figure is the client's and nothing hides behind inference), or a real node with --node. Both ways run
in turns within one process; the figures are medians over the rounds, and only their ratios are comparable elsewhere.
On a machine with other work the ratio of processor time is the steadier one.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection

import aiohttp
import psutil

from backend_client import NPUClient

TEXT = "The quick brown fox jumps over the lazy dog."
MODEL = "all-minilm-l6-v2"
DIMENSIONS = 384
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


class Stopwatch:
    """Microseconds of one call, by the clock and of this process's processor time."""

    def __init__(self, calls: int) -> None:
        self._calls = calls
        self._began = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        """(clock, processor)."""
        clock, processor = self._began
        scale = 1e6 / self._calls
        return (time.perf_counter() - clock) * scale, (time.process_time() - processor) * scale


async def bare(session: aiohttp.ClientSession, url: str, calls: int) -> tuple[float, float]:
    """A plain aiohttp POST, its body read."""
    body = json.dumps({"texts": [TEXT], "model": MODEL}, separators=(",", ":")).encode()
    headers = {
        "Content-Type": "application/json",
        "Accept": "application/octet-stream",
        "X-Request-ID": "req_0123456789abcdef01234567",
        "X-Request-Timeout-Ms": "29999",
    }
    watch = Stopwatch(calls)
    for _ in range(calls):
        async with session.post(f"{url}/embeddings", data=body, headers=headers) as response:
            await response.read()
    return watch.read()


async def ours(client: NPUClient, calls: int) -> tuple[float, float]:
    """NPUClient.embed."""
    watch = Stopwatch(calls)
    for _ in range(calls):
        await client.embed(TEXT)
    return watch.read()


async def measure(url: str, *, calls: int, rounds: int, memory_calls: int) -> None:
    """Run and print."""
    process = psutil.Process()
    async with aiohttp.ClientSession() as session, NPUClient([url]) as client:
        await bare(session, url, calls // 4)
        await ours(client, calls // 4)
        pairs = [(await bare(session, url, calls), await ours(client, calls)) for _ in range(rounds)]
        for index, name in enumerate(("clock", "processor")):
            plain, full = (statistics.median(way[index] for way in column) for column in zip(*pairs, strict=True))
            ratios = sorted(after[index] / before[index] for before, after in pairs)
            print(f"{name:<10} bare aiohttp POST {plain:8.1f} µs, NPUClient.embed {full:8.1f} µs a call: ", end="")
            print(f"ratio {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})")
        if not memory_calls:
            return
        sizes = []
        for _ in range(10):
            await ours(client, memory_calls // 10)
            gc.collect()
            sizes.append(process.memory_info().rss / 1024)
        tenth = memory_calls // 10
        print(f"resident memory    {sizes[0]:8.0f} kB after {tenth} calls, {sizes[-1]:.0f} kB after {memory_calls}")


def main() -> None:
    """Parse the flags, start the server, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--memory-calls", type=int, default=100_000)
    parser.add_argument("--node", help="measure against this node instead of the built-in server")
    args = parser.parse_args()
    measured = {"calls": args.calls, "rounds": args.rounds, "memory_calls": args.memory_calls}
    if args.node:
        asyncio.run(measure(args.node, **measured))
        return
    here, there = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=_serve, args=(there,), daemon=True)
    server.start()
    try:
        asyncio.run(measure(f"http://127.0.0.1:{here.recv()}", **measured))
    finally:
        server.terminate()
        server.join()


if __name__ == "__main__":
    main()
