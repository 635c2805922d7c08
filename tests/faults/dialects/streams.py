"""What the tests of streams ask for, and how they see that a node is at rest again."""

import asyncio
import json

MODEL = "smollm2-135m-instruct"
LONG = {"ignore_eos": True, "stream_options": {"include_usage": True}}
STORY = "Write a long story."
# Answers that go on for far longer than any reader here stays.
ROUTES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Count."}], "max_tokens": 3000, **LONG},
    "/v1/completions": {"prompt": "One, two,", "max_tokens": 3000, **LONG},
    "/v1/responses": {"input": STORY, "max_output_tokens": 3000},
    "/api/chat": {"messages": [{"role": "user", "content": STORY}], "options": {"num_predict": 3000}},
    "/api/generate": {"prompt": STORY, "options": {"num_predict": 3000}},
    "/inference": {"prompt": STORY, "max_new_tokens": 3000, "ignore_eos": True},
}
# What the engine says of itself: sequences advanced by a token, summed over all steps.
ROWS = "npu_node_engine_rows_total"
AT_REST = (
    "npu_node_num_requests_running",
    "npu_node_num_requests_waiting",
    "npu_node_engine_in_flight",
    "npu_node_admission_outstanding",
    "npu_node_kv_cache_usage_ratio",
)


def body_of(route, *, stream=True, tokens=None):
    """The body of a long answer, or of one of at most so many tokens."""
    body = {"model": MODEL, "stream": stream, **ROUTES[route]}
    if not stream:
        body.pop("stream_options", None)
    if tokens is not None and "options" in body:
        body["options"] = {**body["options"], "num_predict": tokens}
    elif tokens is not None:
        body |= {name: tokens for name in ("max_tokens", "max_output_tokens", "max_new_tokens") if name in body}
    return body


def raw_request(route, **body):
    data = json.dumps(body_of(route, **body)).encode()
    return f"POST {route} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


async def connect(node):
    host, port = node.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def metrics(http, node):
    async with http.get(node.url + "/metrics") as reply:
        lines = (await reply.text()).splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if f'model="{MODEL}"' in line)
    return {name.split("{")[0]: float(value) for name, value in pairs}


async def at_rest(http, node):
    """Wait until the node runs nothing, its engine holds nothing, and return the metrics of that moment."""
    async with asyncio.timeout(60):
        while True:
            async with http.get(node.url + "/health") as reply:
                in_flight = sum(model["in_flight"] for model in (await reply.json())["models"])
            now = await metrics(http, node)
            if not in_flight and not any(now[name] for name in AT_REST):
                return now
            await asyncio.sleep(0.1)
