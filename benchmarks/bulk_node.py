"""A process that answers as an embedding node does, with made-up vectors: at once, or at a given rate of texts.

    python -m benchmarks.bulk_node [--rate TEXTS_PER_SECOND]

Shows what the driver, the protocol and the disk cost; it is no measure of inference.
"""

import argparse
import asyncio

import numpy as np
from aiohttp import web

DIMENSIONS = 384
MODEL = {
    "id": "made-up",
    "kind": "embedding",
    "state": "ready",
    "device": "CPU",
    "placements": ["CPU"],
    "space": "made-up",
    "dimensions": DIMENSIONS,
    "context_limit": 8192,
}
VECTOR = np.full(DIMENSIONS, DIMENSIONS**-0.5, "<f4").tobytes()


def application(rate):
    """Its routes. One text at a time is worked on, as in an engine; a rate of 0 is as fast as can be."""
    engine = asyncio.Lock()

    async def health(_):
        return web.json_response({"status": "ready", "version": "made-up", "models": [MODEL]})

    async def embeddings(request):
        count = len((await request.json())["texts"])
        if rate:
            async with engine:
                await asyncio.sleep(count / rate)
        headers = {"X-Shape": f"{count},{DIMENSIONS}", "X-Space": "made-up", "X-Model": "made-up"}
        headers["X-NPU-Node-Device"] = "CPU"
        return web.Response(body=VECTOR * count, content_type="application/octet-stream", headers=headers)

    app = web.Application(client_max_size=64 * 1024 * 1024)
    app.add_routes([web.get("/health", health), web.post("/embeddings", embeddings)])
    return app


async def serve(rate):
    runner = web.AppRunner(application(rate))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=0.0)
    asyncio.run(serve(parser.parse_args().rate))
