"""A backend service as a process: it calls nodes, falls back to a cloud, and exports its metrics.

    python -m tests.ops.client_service NODE…

prints its metrics port and calls until it is told to end. Its cloud is the first node's OpenAI API, so that what it
pays for is real; a second client, none of whose nodes answers, always ends there.
"""

import asyncio
import contextlib
import signal
import sys

from prometheus_client import start_http_server

from backend_client import CloudClient, CloudSettings, InferenceClient, NPUClient, NPUError
from backend_client.observability import Metrics, instrument

WRITER = "smollm2-135m-instruct"


async def main(nodes):
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    server, thread = start_http_server(0, addr="127.0.0.1")
    metrics = Metrics()
    settings = CloudSettings(
        base_url=nodes[0] + "/v1",
        api_key="unused",
        chat_model=WRITER,
        prices={WRITER: {"input": 100, "output": 100}},
        spend_cap=10,
    )
    async with (
        instrument(InferenceClient(NPUClient(nodes), CloudClient(settings)), metrics=metrics) as client,
        instrument(InferenceClient(NPUClient(["http://127.0.0.1:1"]), CloudClient(settings)), metrics=metrics) as lost,
    ):
        print(server.server_port, flush=True)
        turn = 0
        while not stop.is_set():
            turn += 1
            # On a busy machine any of them may fail; the next turn calls again.
            with contextlib.suppress(NPUError):
                # The same text again and again: from the second time on it comes from the node's cache.
                await asyncio.gather(client.embed(f"turn {turn}"), client.embed("the same text"))
            with contextlib.suppress(NPUError):
                await client.generate("Say a word.", max_new_tokens=8)
            with contextlib.suppress(NPUError):
                await lost.generate("Say a word.", max_new_tokens=4)
            # Embeddings have no mapped cloud model, so these fail.
            with contextlib.suppress(NPUError):
                await lost.embed("text", timeout=1)
    server.shutdown()
    thread.join()
    server.server_close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
