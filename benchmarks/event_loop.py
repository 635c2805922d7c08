"""How long the node's event loop is ever blocked: measured by the loop itself, under mixed load."""

import asyncio
import re

from benchmarks import load, workload
from benchmarks.harness import Figure, show, to_json

_BUCKET = re.compile(r'npu_node_event_loop_lag_seconds_bucket\{le="([^"]+)"\} (\S+)')


async def run(node, _store, quick):
    """64 callers of /embeddings, 16 of /inference, large bodies and large replies at once."""
    async with load.session() as http:
        before = await _buckets(http, node.url)
        texts = workload.texts(256 if quick else 1024)
        await asyncio.gather(
            load.embed_one_by_one(http, node.url, texts, 64),
            load.generate_all(http, node.url, workload.prompts(32, 60), 32, 16),
            _large(http, node.url, 1 if quick else 3),
        )
        after = await _buckets(http, node.url)
    counts = {bound: after[bound] - before[bound] for bound in after}
    total = counts["+Inf"]
    over = total - counts["0.05"]
    figures = [
        Figure("readings of the loop's lag (10 a second)", "", [total]),
        Figure("blocked for more than 10 ms", "times", [total - counts["0.01"]]),
        Figure("blocked for more than 50 ms (wanted: 0)", "times", [over]),
    ]
    show("Event loop under 64 embedding and 16 generation callers, with 512-text requests beside them", figures)
    return to_json(figures)


async def _large(http, url, times):
    for _ in range(times):
        body = {"texts": ["a short text"] * 512}
        async with http.post(url + "/embeddings", json=body) as reply:
            assert reply.status == 200, await reply.text()
            await reply.read()


async def _buckets(http, url):
    async with http.get(url + "/metrics") as reply:
        return {bound: float(count) for bound, count in _BUCKET.findall(await reply.text())}
