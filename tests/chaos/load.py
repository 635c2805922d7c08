"""The mixed load: calls through the client, and raw requests to the nodes. Every call is checked when it ends."""

import asyncio
import json
import random
import time
from contextlib import aclosing

import aiohttp
import jsonschema_rs
import numpy as np

from backend_client import NPUError, NPUUnavailableError, RequestRejected, StreamInterrupted
from backend_client.errors import ContextLengthExceeded, EmbedManyFailed
from tests.chaos import texts as chaos_texts
from tests.chaos.invariants import OVERRUN_S
from tests.chaos.oracle import references
from tests.chaos.ranking import RERANKER
from tests.chaos.world import EMBEDDER, GENERATOR, SECOND_ENCODER

TOKENS = 8
_PROMPTS, _LONG_PROMPTS = 6, 3
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}
# Different counts are what is dear: those of one length are admitted.
HOSTILE = {"type": "object", "properties": {f"k{i}": {"type": "string", "maxLength": 17 + i} for i in range(360)}}
HOSTILE["required"] = list(HOSTILE["properties"])
_EXPECTED = (NPUUnavailableError, StreamInterrupted, EmbedManyFailed)
# What a node may answer to a request that is right, while things break around it.
_TYPED = {429, 503, 504, 408}


class Load:
    """`kinds` lists every kind of call with its share of the arrivals."""

    def __init__(self, client, nodes, references, rankings, report, lateness, seed):
        self.client = client
        self.nodes = nodes
        self.oracle = references
        self.rankings = rankings
        self.report = report
        self.lateness = lateness
        self.rng = random.Random(seed + 1)
        self.texts, self.short = self._texts(seed)
        prompts = list(references.answers)
        self.prompts, self.long_prompts = prompts[:_PROMPTS], prompts[_PROMPTS:]
        self.spaces = {}
        self.began = time.monotonic()
        # Their time limit is aiohttp's, not the client's.
        self.raw = {self.schema, self.hostile_schema, self.listing}
        self.kinds = {
            self.embed: 10,
            self.embed_alias: 4,
            self.embed_many: 1,
            self.rerank: 3,
            self.generate: 2,
            self.stream: 2,
            self.long_stream: 0.5,
            self.left_stream: 0.5,
            self.too_long: 0.3,
            self.schema: 0.7,
            self.hostile_schema: 0.3,
            self.listing: 0.5,
        }

    @staticmethod
    def _texts(seed):
        texts = chaos_texts.texts(64, seed=seed)
        return texts, [" ".join(text.split()[:10]) for text in texts]

    @classmethod
    def references(cls, seed, store):
        """Compute the right answers to what a seed asks. `store`: the directory of the models."""
        texts, short = cls._texts(seed)
        prompts = [
            (chaos_texts.prompts(24, 30, seed=seed), _PROMPTS),
            (chaos_texts.prompts(9, 700, seed=seed), _LONG_PROMPTS),
        ]
        embedders = [(store / EMBEDDER, texts + short), (store / SECOND_ENCODER, short)]
        return references(embedders, store / GENERATOR, prompts, TOKENS)

    async def run(self, seconds, rate, on_call):
        """Calls arrive at random, `rate` a second on average, whether or not earlier ones have ended."""
        calls = set()
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end:
            kind = self.rng.choices(list(self.kinds), list(self.kinds.values()))[0]
            on_call()
            call = asyncio.create_task(self.call(kind))
            calls.add(call)
            call.add_done_callback(calls.discard)
            await asyncio.sleep(min(self.rng.expovariate(rate), end - now))
        if calls:
            await asyncio.gather(*calls)

    async def call(self, kind, timeout=None):
        """One call of a kind: by its deadline it ends, with a right answer or a typed error."""
        timeout = timeout or round(10 ** self.rng.uniform(-1.5, 1.3), 3)
        began = time.monotonic()
        name = kind.__name__
        try:
            outcome = await kind(timeout)
        except NPUError as error:
            outcome = type(error).__name__
            # ModelNotFound is both: no call here asks for a model that the nodes lack.
            if isinstance(error, RequestRejected) or not isinstance(error, _EXPECTED):
                self._violated(began, f"{name}: {outcome}: {error.message}; nothing was wrong with the call")
            else:
                self.report.samples.setdefault((name, outcome), f"{began - self.began:.1f} s: {str(error)[:300]}")
        except Exception as error:  # noqa: BLE001  (that is the invariant)
            outcome = type(error).__name__
            self._violated(began, f"{name}: {outcome} is not an error of the client: {error}")
        ended = time.monotonic()
        late = ended - began - timeout - self.lateness.excused(began + timeout, ended)
        if kind not in self.raw:
            self.report.overruns.append(max(0.0, late))
        if late > OVERRUN_S and kind not in self.raw:
            self._violated(began, f"{name}: {outcome} came {late * 1e3:.0f} ms after the deadline of {timeout} s")
        self.report.outcomes[name, outcome] += 1

    def _violated(self, began, what):
        self.report.violated(f"{began - self.began:.1f} s: {what}")

    # Through the client

    async def embed(self, timeout):
        text = self.rng.choice(self.texts)
        result = await self.client.embed_result(text, model=EMBEDDER, timeout=timeout)
        return self._vectors("embed", EMBEDDER, result.space, [text], [result.vector])

    async def embed_alias(self, timeout):
        text = self.rng.choice(self.short)
        result = await self.client.embed_result(text, model="prod", timeout=timeout)
        return self._vectors("embed_alias", "prod", result.space, [text], [result.vector])

    async def embed_many(self, timeout):
        model = self.rng.choice([EMBEDDER, "prod"])
        texts = [self.rng.choice(self.short) for _ in range(150)]
        result = await self.client.embed_many_result(texts, model=model, timeout=timeout)
        return self._vectors("embed_many", model, result.space, texts, result.vectors)

    async def rerank(self, timeout):
        query = self.rng.choice(self.rankings.queries)
        documents = self.rng.sample(self.rankings.documents, 8)
        result = await self.client.rerank(query, documents, model=RERANKER, timeout=timeout)
        ranked = [(document.index, document.score) for document in result.documents]
        if problem := self.rankings.check(query, documents, ranked):
            self._violated(time.monotonic(), f"rerank: {problem}; {result.node}")
        return "ok"

    async def generate(self, timeout):
        prompt = self.rng.choice(self.prompts)
        result = await self.client.generate(prompt, model=GENERATOR, max_new_tokens=TOKENS, timeout=timeout)
        return self._answer("generate", prompt, result)

    async def stream(self, timeout, prompts=None):
        prompt = self.rng.choice(prompts or self.prompts)
        options = {"model": GENERATOR, "max_new_tokens": TOKENS, "timeout": timeout}
        stream = self.client.stream(prompt, **options)
        parts = [piece async for piece in stream]
        if "".join(parts) != stream.result.text:
            self._violated(time.monotonic(), f"stream: pieces {parts} of {stream.result.text!r}")
        return self._answer("stream", prompt, stream.result)

    async def long_stream(self, timeout):
        return await self.stream(timeout, self.long_prompts)

    async def left_stream(self, timeout):
        stream = self.client.stream(self.rng.choice(self.prompts), model=GENERATOR, timeout=timeout)
        async with aclosing(stream) as pieces:
            async for _ in pieces:
                break
        return "left"

    async def too_long(self, timeout):
        try:
            await self.client.generate("word " * 12_000, model=GENERATOR, timeout=timeout)
        except (ContextLengthExceeded, RequestRejected):
            return "rejected"
        self._violated(time.monotonic(), "a prompt longer than the context was answered")
        return "answered"

    # Straight to a node, as stock clients do

    async def schema(self, timeout):
        status, body = await self._post(timeout, SCHEMA)
        if status == 200:
            choice = body["choices"][0]
            if choice["finish_reason"] == "stop" and not jsonschema_rs.is_valid(
                SCHEMA, json.loads(choice["message"]["content"])
            ):
                self._violated(time.monotonic(), "an answer that does not match its schema")
        elif status not in _TYPED and status is not None:
            self._violated(time.monotonic(), f"schema: {status} {body}")
        return str(status)

    async def hostile_schema(self, timeout):
        status, body = await self._post(timeout, HOSTILE)
        if status not in {400, None} | _TYPED:
            self._violated(time.monotonic(), f"hostile schema: {status} {str(body)[:200]}")
        return str(status)

    async def listing(self, timeout):
        """What dashboards ask, whatever state the models and the store are in."""
        path = self.rng.choice(["/v1/models", "/api/tags", "/api/ps", "/metrics"])
        try:
            async with (
                asyncio.timeout(timeout),
                aiohttp.ClientSession() as http,
                http.get(self.rng.choice(self.nodes).proxy.url + path) as reply,
            ):
                await reply.read()
                if reply.status != 200:
                    self._violated(time.monotonic(), f"{path} answered {reply.status}: {await reply.text()}")
                return str(reply.status)
        except (aiohttp.ClientError, TimeoutError, OSError):
            return "None"

    async def _post(self, timeout, schema):
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
        message = {"role": "user", "content": "Describe a cat as JSON."}
        body = {"model": GENERATOR, "messages": [message], "max_tokens": 24, "response_format": form}
        headers = {"X-Request-Timeout-Ms": str(max(1, int(timeout * 1000)))}
        url = self.rng.choice(self.nodes).proxy.url + "/v1/chat/completions"
        try:
            async with (
                asyncio.timeout(timeout),
                aiohttp.ClientSession() as http,
                http.post(url, json=body, headers=headers) as reply,
            ):
                return reply.status, await reply.json()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return None, None  # cut, refused or silent: the network's doing

    def _vectors(self, kind, model, space, texts, vectors):
        if problem := self.oracle.check_vectors(space, texts, np.asarray(vectors, dtype=np.float32)):
            self._violated(time.monotonic(), f"{kind}: {problem}")
        bound = self.spaces.setdefault(model, space)
        if bound != space:
            self._violated(time.monotonic(), f"{kind}: {model} was in {bound} and is now in {space}")
        return "ok"

    def _answer(self, kind, prompt, result):
        if problem := self.oracle.check_answer(prompt, result.text):
            self._violated(
                time.monotonic(),
                f"{kind}: {problem}; {result.node}, {result.finish_reason}, {result.usage}, {result.timing}",
            )
        return "ok"
