"""`make demo`: a node on this machine, called through the client; then its end, and the fallback.

Everything in it is real: the weights, the node, the client. The cloud is your own if NPU_CLIENT_CLOUD__API_KEY and its
companions are set, else a stand-in that the demo starts: a second node, spoken to in OpenAI's dialect.
`python examples/demo.py --svg docs/img/demo.svg` records what it prints as the picture of the README.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":
    # Before the slow imports: the first sign of life comes at once.
    print("loading the client's libraries: a few seconds, the first time more", file=sys.stderr, flush=True)

import numpy as np
from pydantic import SecretStr
from rich.console import Console
from rich.table import Table

from backend_client import InferenceClient, NPUUnavailableError
from backend_client.results import EmbedResult, GenerateResult
from backend_client.settings import ClientSettings, CloudSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

EMBEDDER, GENERATOR = "all-minilm-l6-v2", "smollm2-135m-instruct"
SENTENCES = (
    "A cat sits on the mat.",
    "A feline rests upon a rug.",
    "Quarterly revenue rose by 12%.",
)
QUESTION = "What is the capital of France?"
READY_WITHIN_S = 120
NEXT = """\
make serve
    a node, its dashboard at http://127.0.0.1:8081/dashboard
.venv/bin/npu-node pull phi-3.5-mini-npu
    a useful chat model, for NPU and CPU: that of this demo
    is a toy of 135 million parameters
.venv/bin/npu-node doctor
    what this machine has, and what it lacks for an NPU
README.md, "Call it"
    the same calls from your service"""

console = Console(highlight=False, record=True)


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Say what is waited for: with a spinner on a terminal, as a line elsewhere."""
    if not console.is_terminal:
        print(f"{what} ...", file=sys.stderr, flush=True)
    with console.status(what):
        yield


@contextmanager
def node(name: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A node process on a free port of this machine, ended with the block. Yields it and its URL."""
    with subprocess.Popen(
        [sys.executable, "-m", "worker_node", "serve", "--port", "0", "--log-level", "error"],
        env=os.environ | {"NPU_NODE_CONFIG": ""},  # not this machine's settings
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,  # Ctrl-C is for this script, which ends its nodes
    ) as process:
        try:
            with doing(f"the {name} starts: a process of its own"):
                line = process.stdout.readline() if process.stdout else ""
            # Ctrl-C came while the node was leaving this script's group.
            if not line and process.wait() == -signal.SIGINT:
                raise KeyboardInterrupt
            if not line.startswith("listening on "):
                raise SystemExit(f"the {name} did not start; its message is above")
            yield process, line.split()[-1]
        finally:
            process.terminate()


async def ready(client: InferenceClient, name: str) -> None:
    """Wait until the client sees its node serve all models."""
    with doing(f"the {name} loads its models and checks their known answers"):
        deadline = time.monotonic() + READY_WITHIN_S
        while True:
            nodes = await client.npu.health()
            if nodes[0].usable and all(model.state == "ready" for model in nodes[0].models):
                return
            if time.monotonic() > deadline:
                raise SystemExit(f"the {name} was not ready within {READY_WITHIN_S} s: {nodes[0].trouble}")
            await asyncio.sleep(0.2)


def show_health(client: InferenceClient) -> None:
    table = Table(title="Nodes as the client sees them", title_justify="left")
    for column in ("node", "status", "model", "state", "device"):
        table.add_column(column, overflow="fold")
    for status in client.npu.status():
        for model in status.models:
            table.add_row(status.url, status.status, model.id, model.state, model.device or "-")
    console.print(table)
    if not any((model.device or "").startswith("NPU") for status in client.npu.status() for model in status.models):
        console.print("None of them runs on an NPU: .venv/bin/npu-node doctor says what this machine lacks for one.")


async def embed(client: InferenceClient, served: Counter[str], devices: dict[str, str]) -> None:
    """Embed the sentences and print how alike they are."""
    results = [await client.embed_result(text) for text in SENTENCES]
    vectors = np.asarray([result.vector for result in results])
    table = Table(title="Similarity of sentences", title_justify="left")
    for column in ("sentence", "and", "cosine"):
        table.add_column(column)
    for a, b in combinations(range(len(SENTENCES)), 2):
        table.add_row(SENTENCES[a], SENTENCES[b], f"{vectors[a] @ vectors[b]:.3f}")
    console.print(table)
    for result in results:
        served[f"embed     by {server(result, devices)}"] += 1


async def ask(client: InferenceClient, served: Counter[str], devices: dict[str, str]) -> None:
    """Stream an answer."""
    console.print(f"[bold]{QUESTION}[/] ", end="")
    began = time.monotonic()
    stream = client.stream(QUESTION, model=GENERATOR, max_new_tokens=40)
    async for piece in stream:
        console.print(piece, end="", markup=False)
    result = stream.result
    console.print(f"\n[dim]{result.usage.completion_tokens} tokens in {time.monotonic() - began:.2f} s[/]")
    served[f"generate  by {server(result, devices)}"] += 1


async def try_both(client: InferenceClient, served: Counter[str], devices: dict[str, str]) -> None:
    for call in (embed, ask):
        try:
            await call(client, served, devices)
        except NPUUnavailableError as error:
            console.print(f"[yellow]{call.__name__}: {error}[/]")
            served[f"{call.__name__:9s} by nobody: the reason is above"] += 1


def server(result: EmbedResult | GenerateResult, devices: dict[str, str]) -> str:
    """Who answered, and on which device: `source` is "node" or "cloud", whatever device ran the call."""
    if result.source == "cloud":
        who = "the stand-in for the cloud" if devices else "your own cloud"
        return f"{who} at {result.node}, {devices.get(result.model, 'device unknown')}"
    emulated = " (emulated)" if result.emulated else ""
    return f"the node at {result.node}, on its {result.device}{emulated}"


def devices_of(client: InferenceClient) -> dict[str, str]:
    """What the models of the stand-in run on, by model: a cloud does not say so itself."""
    return {model.id: f"on its {model.device}" for status in client.npu.status() for model in status.models}


async def stand_in(url: str, space: str) -> CloudSettings:
    """The second node as an OpenAI-compatible cloud: the same models, so the same vector space."""
    return CloudSettings(
        api_key=SecretStr("stand-in"),
        base_url=url + "/v1",
        chat_model=GENERATOR,
        chat_models={GENERATOR: GENERATOR},
        embedding_models={space: EMBEDDER},
    )


async def main() -> None:
    """Run the demo; SystemExit with a message when a step fails."""
    served: Counter[str] = Counter()
    own_cloud = ClientSettings.load().cloud
    with ExitStack() as stack:
        console.rule("1  A node starts")
        process, url = stack.enter_context(node("node"))
        console.print(f"node {process.pid} listens on {url}")
        second = None if own_cloud else stack.enter_context(node("stand-in for the cloud"))
        async with InferenceClient.from_settings(ClientSettings(nodes=[url])) as client:
            await ready(client, "node")
            show_health(client)
            console.rule("2  The backend calls it")
            await embed(client, served, {})
            await ask(client, served, {})
            space = (await client.embed_result("once more")).space
        cloud, devices = own_cloud, {}
        if second is not None:
            async with InferenceClient.from_settings(ClientSettings(nodes=[second[1]])) as warm:
                await ready(warm, "stand-in")
                devices = devices_of(warm)
            cloud = await stand_in(second[1], space)
        settings = ClientSettings(nodes=[url], cloud=cloud, spaces={EMBEDDER: space})
        async with InferenceClient.from_settings(settings) as client:
            await client.embed("known to be up")
            console.rule("3  The node is killed")
            process.kill()
            process.wait()
            what = "your own cloud"
            if second is not None:
                runs_on = ", ".join(f"{model} {device}" for model, device in devices.items())
                what = f"a stand-in for the cloud: a second node at {second[1]} ({runs_on})"
            console.print(f"kill -9 {process.pid}; the fallback is {what}")
            console.rule("4  The same calls again")
            await try_both(client, served, devices)
    console.rule("Who served what")
    for what, times in served.items():
        console.print(f"{times} x {what}", markup=False)
    console.rule("What next")
    console.print(NEXT, markup=False)


if __name__ == "__main__":
    # The client warns of the node that dies, in the middle of an answer; here that is the plot.
    logging.basicConfig(level=logging.ERROR)
    parser = argparse.ArgumentParser(prog="python examples/demo.py")
    parser.add_argument("--svg", metavar="FILE", help="write what the demo printed to this file, as a picture")
    options = parser.parse_args()
    if options.svg:
        console.width = 100
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        sys.exit(130)
    if options.svg:
        # Without the fonts, which rich would have a browser fetch from another host.
        picture = re.sub(r"@font-face \{.*?\}", "", console.export_svg(title="make demo"), flags=re.DOTALL)
        Path(options.svg).write_text(picture, encoding="utf-8")
