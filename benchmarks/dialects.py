"""The dialects against each other: streamed chat through /v1 and /api, as shares of /inference in the same run.

The node is one of its own without prefix caching, so that all dialects can be given the same prompts and do the same
work for the same answers.
"""

import asyncio
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks import load, workload
from benchmarks.harness import Figure, show, to_json
from benchmarks.node import start_node

MODEL = "smollm2-135m-instruct"
TOKENS = 64
LENGTH = 60
WITHIN = 0.02


@dataclass(frozen=True)
class Dialect:
    """How a route is asked for a streamed answer, which of its lines has text, and where its last ones count it."""

    path: str
    body: Callable[[str], dict]
    has_text: Callable[[bytes], bool]
    tokens: Callable[[dict], int | None]


def _messages(prompt):
    return {"model": MODEL, "stream": True, "messages": [{"role": "user", "content": prompt}]}


def _has_content(line):
    return b'"content":"' in line and b'"content":""' not in line


DIALECTS = (
    Dialect(
        "/inference",
        lambda prompt: {"model": MODEL, "stream": True, "prompt": prompt, "max_new_tokens": TOKENS},
        lambda line: line.startswith(b'data: {"text"'),
        lambda last: last.get("usage", {}).get("completion_tokens"),
    ),
    Dialect(
        "/v1/chat/completions",
        lambda prompt: _messages(prompt) | {"max_tokens": TOKENS, "stream_options": {"include_usage": True}},
        _has_content,
        lambda last: (last.get("usage") or {}).get("completion_tokens"),
    ),
    Dialect(
        "/api/chat",
        lambda prompt: _messages(prompt) | {"options": {"num_predict": TOKENS}},
        _has_content,
        lambda last: last.get("eval_count"),
    ),
)


async def run(_node, _store, quick):
    """Measure and print; return the figures."""
    models = json.dumps([{"name": MODEL, "enable_prefix_caching": False}])
    figures = []
    with start_node("--log-level", "warning", NPU_NODE_MODELS=models) as node:
        async with load.session() as http:
            for callers, rounds in ((1, 4), (8, 2)) if quick else ((1, 40), (8, 20)):
                figures += await _compare(http, node.url, callers, rounds)
    return to_json(figures)


async def _compare(http, url, callers, rounds):
    """Every dialect in each round, with the same prompts, each time another one first; round −1 does not count."""
    firsts = {dialect.path: [] for dialect in DIALECTS}
    rates = {dialect.path: [] for dialect in DIALECTS}
    for turn in range(-1, rounds):
        prompts = workload.prompts(callers, LENGTH, seed=turn + 1)
        for place in range(len(DIALECTS)):
            dialect = DIALECTS[(turn + place) % len(DIALECTS)]
            first, rate = await _ask_all(http, url, dialect, prompts)
            if turn >= 0:
                firsts[dialect.path].append(first * 1e3)
                rates[dialect.path].append(rate)
    title = (
        f"Dialects, {callers} callers, prompts of {LENGTH} tokens, up to {TOKENS} new tokens, streamed, {rounds} rounds"
    )
    figures = _figures("time to first token", "ms", firsts) + _figures("tokens/s", "tokens/s", rates)
    show(title, figures)
    _judge(figures)
    return figures


async def _ask_all(http, url, dialect, prompts):
    """The median seconds to the first text, and the tokens per second of all callers together."""
    began = time.perf_counter()
    answers = await asyncio.gather(*(_ask(http, url, dialect, prompt) for prompt in prompts))
    seconds = time.perf_counter() - began
    return statistics.median(first for first, _ in answers), sum(tokens for _, tokens in answers) / seconds


async def _ask(http, url, dialect, prompt):
    """Seconds to the first text, and how many tokens the answer had."""
    body = dialect.body(prompt)
    began = time.perf_counter()
    first, last = None, b""
    async with http.post(url + dialect.path, json=body) as reply:
        assert reply.status == 200, await reply.text()
        async for line in reply.content:
            if first is None and dialect.has_text(line):
                first = time.perf_counter() - began
            if b"{" in line:
                last = line
    tokens = dialect.tokens(json.loads(last.removeprefix(b"data: ")))
    assert first is not None
    assert tokens
    return first, tokens


def _figures(name, unit, values):
    """A figure for each dialect, with its ratios to the first one, round by round."""
    baseline = values[DIALECTS[0].path]
    return [
        Figure(
            f"{name}, {path}",
            unit,
            own,
            [] if own is baseline else [mine / its for mine, its in zip(own, baseline, strict=True)],
        )
        for path, own in values.items()
    ]


def _judge(figures):
    for figure in figures:
        if figure.ratios:
            off = statistics.median(figure.ratios) - 1
            verdict = "reached" if abs(off) <= WITHIN else "MISSED"
            print(f"  {figure.name:58s} {off * 100:+.2f} % of /inference   wanted: within {WITHIN:.0%}: {verdict}")
    print(flush=True)
