"""The checks of one model on one device, in their order; each is told of in words, and with its figures."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import httpx2
import numpy as np

from worker_node.certify import inputs
from worker_node.certify.nodes import CallFailed, Json, Reference, RunningNode
from worker_node.certify.score import NotScored, Scorer
from worker_node.core.environment import native_environment
from worker_node.devices.memory import resident_memory

# How much likelier (natural logarithm) a CPU may find another token than the one that was taken: twenty times what was
# seen on a right device (docs/certify.md).
MARGIN = 1.0
COSINE = 0.99
_TOKENS = 12
_WITHIN = 32
_SUITED_GAP = 0.02


@dataclass(frozen=True, slots=True)
class Check:
    """What came of one check; `facts` are the numbers of docs/npu-facts.md that it is about."""

    name: str
    status: Literal["passed", "failed", "skipped"]
    detail: str
    facts: tuple[int, ...] = ()
    values: Json = field(default_factory=dict)

    def as_dict(self) -> Json:
        return asdict(self) | {"facts": list(self.facts)}


class Failed(Exception):
    """A check failed; the text says what was wrong."""

    def __init__(self, detail: str, **values: Any) -> None:
        super().__init__(detail)
        self.values = values


class Skipped(Exception):
    """A check has no object here; the text says why."""


@dataclass(slots=True)
class Plan:
    """How much is asked; `only`: the names of the checks that are made, all without one."""

    prompts: int = 20
    texts: int = 200
    endurance_s: float = 600.0
    suspend: bool = False
    only: frozenset[str] = frozenset()

    @classmethod
    def quick(cls) -> Plan:
        """Five minutes after compiling."""
        return cls(prompts=6, texts=40, endurance_s=0.0)


class Certification:
    """Runs the checks of the model's kind. `restart` ends the node and starts it again: a second load."""

    def __init__(
        self,
        node: RunningNode,
        reference: Reference,
        scorer: Scorer,
        restart: Callable[[], RunningNode],
        plan: Plan,
        say: Callable[[str], None],
    ) -> None:
        self.node = node
        self.checks: list[Check] = []
        self.limit: int | None = None
        self.rates: dict[str, float | None] = {"prompt_tokens_per_s": None, "tokens_per_s": None, "texts_per_s": None}
        self._reference = reference
        self._scorer = scorer
        self._restart = restart
        self._plan = plan
        self._say = say
        model = node.model()
        self._model: str = model["id"]
        self._kind: str = model["kind"]
        engine = model["engines"][0]
        limit: int = engine["prompt_limit"] or model["context_limit"]
        room: int = (engine["total_limit"] or model["context_limit"]) - _TOKENS - 4
        self._window: int = min(limit, room) if self._kind == "generation" else limit
        self._on_npu, self._on_cpu = engine["device"] == "NPU", engine["device"] == "CPU"

    def run(self) -> None:
        """All checks. What fails does not keep the next one from being made."""
        kinds: dict[str, Sequence[tuple[str, Callable[[], tuple[str, Json]], tuple[int, ...]]]] = {
            "generation": (
                ("agreement with the CPU", self._agreement, (1, 5, 6)),
                ("largest prompt that is answered rightly", self._largest, (4, 9)),
                ("structured output", self._structured, ()),
                ("time by prompt length", self._times, (10,)),
                ("equal answers side by side", self._concurrent, ()),
                ("cancellation", self._cancelled, ()),
            ),
            "embedding": (("agreement with the CPU", self._vectors, (1, 2, 13)), ("texts a second", self._texts, ())),
            "rerank": (("order as the CPU's", self._order, (2, 13)),),
            "transcription": (("two recordings in turn", self._recordings, (3, 7)),),
            "vision": (("images", self._images, (12,)), ("structured output", self._structured, ())),
        }
        common = (
            ("canary", self._canary, (1,)),
            *kinds.get(self._kind, ()),
            ("busy counter", self._busy, (18, 20)),
            ("memory", self._memory, (14,)),
            ("killed engine", self._killed, (20,)),
            ("second load", self._second_load, (14, 15, 16)),
            ("suspend and resume", self._suspended, (19,)),
            ("endurance", self._endurance, ()),
        )
        for name, check, facts in common:
            if self._plan.only and name not in self._plan.only:
                continue
            self._say(f"{name} …")
            began = time.monotonic()
            try:
                detail, values = check()
                found = Check(name, "passed", detail, facts, values)
            except Skipped as reason:
                found = Check(name, "skipped", str(reason), facts)
            except Failed as problem:
                found = Check(name, "failed", str(problem), facts, problem.values)
            except (
                CallFailed,
                NotScored,
                KeyError,
                IndexError,
                TypeError,
                ValueError,
                httpx2.HTTPError,
                OSError,
            ) as error:
                said = (
                    error.message if isinstance(error, CallFailed | NotScored) else f"{type(error).__name__}: {error}"
                )
                found = Check(name, "failed", said[:500], facts)
            self.checks.append(found)
            self._say(f"{name}: {found.status}, {found.detail} ({time.monotonic() - began:.0f} s)")
            if found.status == "failed":
                self._await_ready()

    def _await_ready(self, limit_s: float = 300.0) -> float:
        """Wait until the model serves again; the seconds that it took."""
        began = time.monotonic()
        while time.monotonic() - began < limit_s:
            with contextlib.suppress(CallFailed, KeyError):
                model = self.node.model()
                if model["state"] in {"ready", "degraded"} and model["device"] is not None:
                    break
                if model["state"] in {"quarantined", "failed"}:
                    break
            time.sleep(0.2)
        return time.monotonic() - began

    def _canary(self) -> tuple[str, Json]:
        canary = self.node.model()["engines"][0]["canary"]
        if canary is None:
            raise Skipped("the model has none")
        return f"passed on {canary['device']}", {}

    # -- generation ---------------------------------------------------------------------------------------------------

    def _tokenize(self, text: str) -> list[int]:
        tokens: list[int] = self.node.post(
            "/tokenize", {"model": self._model, "prompt": text, "add_special_tokens": False}
        )["tokens"]
        return tokens

    def _text_of(self, tokens: list[int]) -> str:
        text: str = self.node.post("/detokenize", {"model": self._model, "tokens": tokens})["prompt"]
        return text

    def _prompt(self, tokens: int, index: int) -> str:
        return inputs.prompt_of(tokens, index, self._tokenize, self._text_of)

    def _wrong(self, prompt: str) -> tuple[float, bool]:
        """By how much the CPU prefers another token to one of the answer (0: none), and whether that is a fault."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": _TOKENS, "temperature": 0}
        answer = self.node.post("/v1/completions", body)["choices"][0]["text"]
        # A CPU's own answers would only be compared with themselves.
        if not self._on_cpu and answer == self._reference.post("/v1/completions", body)["choices"][0]["text"]:
            return 0.0, False
        before, whole = self._tokenize(prompt), self._tokenize(prompt + answer)
        margins = self._scorer.margins(whole, max(1, len(whole) - len(before)))
        return max(margins), max(margins) > MARGIN

    def _agreement(self) -> tuple[str, Json]:
        found: list[tuple[int, float, bool]] = []
        for index, length in enumerate(inputs.growing(self._window - 1, self._plan.prompts)):
            found.append((length, *self._wrong(self._prompt(length, index))))
            self._say(f"  {length} tokens: {'another answer' if found[-1][2] else 'agrees'}")
        self._measured = found
        wrong = [length for length, _, fault in found if fault]
        near = sum(margin > 0 and not fault for _, margin, fault in found)
        values = {
            "lengths": [length for length, _, _ in found],
            "margins": [round(margin, 3) for _, margin, _ in found],
            "bound": MARGIN,
        }
        if wrong and min(wrong) == found[0][0]:
            shown = ", ".join(map(str, wrong[:8]))
            raise Failed(f"answers that the CPU finds wrong, at prompts of {shown} tokens", **values)
        said = f"{len(found) - len(wrong)} of {len(found)} prompts are answered as by the CPU"
        return f"{said}, {near} of them but for near ties", values

    def _largest(self) -> tuple[str, Json]:
        measured = getattr(self, "_measured", [])
        wrong = [length for length, _, fault in measured if fault]
        if not measured:
            raise Skipped("agreement could not be measured")
        if not wrong:
            return f"the whole window, {measured[-1][0]} tokens", {"tokens": measured[-1][0]}
        low = max((length for length, _, _ in measured if length < min(wrong)), default=0)
        high = min(wrong)
        if low == 0:
            raise Failed("not even the shortest prompt is answered rightly", tokens=0)
        while high - low > _WITHIN:
            middle = (low + high) // 2
            if self._wrong(self._prompt(middle, 0))[1] or self._wrong(self._prompt(middle, 1))[1]:
                high = middle
            else:
                low = middle
            self._say(f"  between {low} and {high} tokens")
        self.limit = low
        return f"{low} tokens; from {high} on answers are wrong, of a window of {self._window}", {
            "tokens": low,
            "wrong_from": high,
            "window": self._window,
        }

    def _structured(self) -> tuple[str, Json]:
        schema = {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 12},
                "count": {"type": "integer", "minimum": 0, "maximum": 9},
            },
            "required": ["name", "count"],
            "additionalProperties": False,
        }
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": "Name a fruit and how many."}],
            "max_tokens": 64,
            "temperature": 0,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "fruit", "schema": schema, "strict": True},
            },
        }
        text = self.node.post("/v1/chat/completions", body)["choices"][0]["message"]["content"]
        try:
            value = json.loads(text)
        except ValueError:
            raise Failed("the answer to a strict schema is not JSON") from None
        if set(value) != {"name", "count"} or type(value["count"]) is not int or not 0 <= value["count"] <= 9:
            raise Failed("the answer to a strict schema is not of that schema")
        tool = {"type": "function", "function": {"name": "count", "strict": True, "parameters": schema}}
        asked = {key: body[key] for key in ("model", "messages", "max_tokens", "temperature")}
        asked |= {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "count"}}}
        calls = self.node.post("/v1/chat/completions", asked)["choices"][0]["message"].get("tool_calls") or []
        if [call["function"]["name"] for call in calls] != ["count"]:
            raise Failed("the tool that had to be called was not")
        if set(json.loads(calls[0]["function"]["arguments"])) != {"name", "count"}:
            raise Failed("the arguments of the tool are not of its schema")
        return "a strict schema is held, a required tool is called", {}

    def _times(self) -> tuple[str, Json]:
        lengths = inputs.growing(max(17, (self.limit or self._window) - 32), 5)
        first, speed = [], []
        for index, length in enumerate(lengths):
            body = {
                "model": self._model,
                # Another beginning each time: nothing is in a prefix cache.
                "prompt": f"{index}. {self._prompt(length - 4, index + 3)}",
                "max_tokens": 16,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
            times = self._stream(body)
            first.append(times[0])
            if len(times) > 2:
                speed.append((len(times) - 1) / max(1e-6, times[-1] - times[0]))
        self.rates["tokens_per_s"] = round(statistics.median(speed), 2) if speed else None
        self.rates["prompt_tokens_per_s"] = round(lengths[-1] / first[-1], 1)
        said = f"first token after {first[0]:.2f} s ({lengths[0]} tokens) to {first[-1]:.2f} s ({lengths[-1]} tokens)"
        values = {"lengths": lengths, "first_token_s": [round(seconds, 3) for seconds in first], **self.rates}
        return f"{said}, then {self.rates['tokens_per_s']} tokens a second", values

    def _stream(self, body: Json) -> list[float]:
        """The seconds after which each part of the text came."""
        began, times = time.monotonic(), []
        with self.node.http.stream("POST", "/v1/completions", json=body) as reply:
            if reply.status_code != 200:
                raise CallFailed(f"HTTP {reply.status_code} for a stream: {reply.read().decode()[:200]}")
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if event.get("error"):
                        raise CallFailed(f"the stream failed: {str(event['error'])[:200]}")
                    if event.get("choices") and event["choices"][0].get("text"):
                        times.append(time.monotonic() - began)
        if not times:
            raise Failed("a stream had no text")
        return times

    def _concurrent(self) -> tuple[str, Json]:
        prompts = [self._prompt(40 + index, index) for index in range(6)]
        bodies = [{"model": self._model, "prompt": prompt, "max_tokens": 8, "temperature": 0} for prompt in prompts]

        def ask(body: Json) -> str:
            text: str = self.node.post("/v1/completions", body)["choices"][0]["text"]
            return text

        alone = [ask(body) for body in bodies]
        with ThreadPoolExecutor(len(bodies)) as pool:
            together = list(pool.map(ask, bodies))
        differ = sum(one != other for one, other in zip(alone, together, strict=True))
        if differ > len(bodies) // 2:
            raise Failed(f"{differ} of {len(bodies)} answers differ when they are asked for at once")
        return f"{len(bodies) - differ} of {len(bodies)} answers at once are those of one at a time", {"differ": differ}

    def _cancelled(self) -> tuple[str, Json]:
        body = {"model": self._model, "prompt": "Count:", "max_tokens": 100, "ignore_eos": True, "stream": True}
        with self.node.http.stream("POST", "/v1/completions", json=body) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: "):
                    break
        began = time.monotonic()
        while self.node.model()["in_flight"] and time.monotonic() - began < 60:
            time.sleep(0.05)
        seconds = time.monotonic() - began
        if seconds >= 60:
            raise Failed("a request whose caller left was still running after 60 s")
        return f"a request ended {seconds:.1f} s after its caller left", {"seconds": round(seconds, 2)}

    # -- encoders -----------------------------------------------------------------------------------------------------

    def _vectors(self) -> tuple[str, Json]:
        worst, at, cosines = 1.0, "", []
        given = list(inputs.texts(self._plan.texts, min(self._window, 512)))
        for text in given:
            body = {"model": self._model, "input": [text], "encoding_format": "base64"}
            expected, found = (_vector(who.post("/v1/embeddings", body)) for who in (self._reference, self.node))
            if not np.isfinite(found).all() or len(found) != len(expected):
                raise Failed(f"a text of {len(text.split())} words has no vector of {len(expected)} numbers")
            cosine = float(found @ expected / max(1e-12, float(np.linalg.norm(found) * np.linalg.norm(expected))))
            cosines.append(cosine)
            if cosine < worst:
                worst, at = cosine, f"{len(text.split())} words"
        values = {"lowest": round(worst, 6), "mean": round(statistics.fmean(cosines), 6), "bound": COSINE}
        if worst < COSINE:
            bad = sum(cosine < COSINE for cosine in cosines)
            raise Failed(f"{bad} of {len(given)} vectors are not the CPU's: cosine {worst:.3f} at {at}", **values)
        return f"{len(given)} vectors as the CPU's, cosine {worst:.5f} at least", values

    def _texts(self) -> tuple[str, Json]:
        batch = list(inputs.texts(64, min(self._window, 512)))
        body = {"model": self._model, "input": batch, "encoding_format": "base64"}
        self.node.post("/v1/embeddings", body)
        began = time.monotonic()
        self.node.post("/v1/embeddings", body)
        rate = len(batch) / (time.monotonic() - began)
        self.rates["texts_per_s"] = round(rate, 1)
        return f"{rate:.0f} texts of all lengths a second", {"texts_per_s": round(rate, 1)}

    def _order(self) -> tuple[str, Json]:
        for query, _ in inputs.RANKED:
            body = {"model": self._model, "query": query, "documents": [text.strip() for text in inputs.PASSAGES]}
            expected, found = (
                {row["index"]: row["relevance_score"] for row in who.post("/v1/rerank", body)["results"]}
                for who in (self._reference, self.node)
            )
            for first in expected:
                for second in expected:
                    if expected[first] - expected[second] > _SUITED_GAP and found[first] < found[second]:
                        raise Failed(
                            f"documents {first} and {second} of a query stand the other way round than the CPU's"
                        )
        return f"{len(inputs.RANKED)} queries rank {len(inputs.PASSAGES)} documents as the CPU does", {}

    # -- speech, images -----------------------------------------------------------------------------------------------

    def _recordings(self) -> tuple[str, Json]:
        first, second = inputs.recordings()
        path = "/v1/audio/transcriptions"
        expected = [_words(self._reference.upload(path, sound, self._model)["text"]) for sound in (first, second)]
        if expected[0] == expected[1]:
            raise Skipped("the CPU hears the same in both recordings")
        for turn, which in enumerate((0, 1, 0, 1, 1, 0)):
            heard = _words(self.node.upload(path, (first, second)[which], self._model)["text"])
            if heard != expected[which]:
                stale = heard == expected[1 - which]
                what = "the text of the recording before" if stale else "another text than the CPU"
                raise Failed(f"turn {turn + 1}: the device wrote {what}")
        return "six turns of two recordings, each with its own text", {}

    def _images(self) -> tuple[str, Json]:
        found = []
        for colour in ((220, 20, 20), (20, 40, 220)):
            url = f"data:image/bmp;base64,{base64.b64encode(_bitmap(colour)).decode()}"
            parts: list[Json] = [
                {"type": "image_url", "image_url": {"url": url}},
                {"type": "text", "text": "Which colour is this?"},
            ]
            body = {
                "model": self._model,
                "messages": [{"role": "user", "content": parts}],
                "max_tokens": _TOKENS,
                "temperature": 0,
            }
            expected, answer = (
                who.post("/v1/chat/completions", body)["choices"][0]["message"]["content"]
                for who in (self._reference, self.node)
            )
            found.append((expected, answer))
        if found[0][0] != found[1][0] and found[0][1] == found[1][1]:
            raise Failed("two images of different colours get one answer, and different ones from the CPU")
        equal = sum(expected == answer for expected, answer in found)
        return f"{equal} of {len(found)} answers about images as the CPU's", {"equal": equal}

    # -- the device ---------------------------------------------------------------------------------------------------

    def _busy(self) -> tuple[str, Json]:
        if not self._on_npu:
            raise Skipped("this device has no busy counter")
        before, began = self.node.health()["npu"], time.monotonic()
        busy = self._work()["_busy_us"]
        took = (time.monotonic() - began) * 1e6
        if before["busy_time_us"] is None:
            raise Failed(f"the busy counter cannot be read: {before['reasons'].get('busy_time_us')}")
        if not busy:
            raise Failed("the busy counter stood still while the device worked: nothing proves where this was computed")
        if busy > took * 1.05 + 2_000:
            raise Failed(f"the busy counter moved by {busy} µs in a request of {took:.0f} µs: others use the device")
        return f"{busy / 1e3:.1f} ms busy in a request of {took / 1e3:.1f} ms", {
            "busy_us": busy,
            "request_us": round(took),
        }

    def _work(self) -> Json:
        """One ordinary request of the model's kind."""
        if self._kind == "transcription":
            return self.node.upload("/v1/audio/transcriptions", inputs.recordings()[0], self._model)
        said = [{"role": "user", "content": "Say yes."}]
        calls: dict[str, tuple[str, Json]] = {
            "embedding": ("/v1/embeddings", {"input": ["one ordinary text"]}),
            "rerank": ("/v1/rerank", {"query": inputs.RANKED[0][0], "documents": list(inputs.PASSAGES[:2])}),
            "vision": ("/v1/chat/completions", {"messages": said, "max_tokens": 4, "temperature": 0}),
            "generation": (
                "/v1/completions",
                {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0},
            ),
        }
        path, body = calls[self._kind]
        return self.node.post(path, {"model": self._model, **body})

    def _memory(self) -> tuple[str, Json]:
        pid = self.node.model()["engines"][0]["pid"]
        before = resident_memory(pid)
        if before is None:
            raise Skipped("this system does not tell")
        for _ in range(5):
            self._work()
        after = resident_memory(pid) or 0
        values = {"engine_bytes": after, "grown_bytes": after - before}
        if after - before > max(200 * 2**20, before // 4):
            raise Failed(f"the engine grew by {(after - before) / 2**20:.0f} MB in five requests", **values)
        return f"the engine has {after / 2**20:.0f} MB", values

    def _killed(self) -> tuple[str, Json]:
        os.kill(self.node.model()["engines"][0]["pid"], getattr(signal, "SIGKILL", signal.SIGTERM))
        began = time.monotonic()
        self._await_new_engine()
        self._work()
        seconds = time.monotonic() - began
        return f"the engine was killed, and the next request served after {seconds:.1f} s", {
            "seconds": round(seconds, 2)
        }

    def _await_new_engine(self) -> None:
        time.sleep(0.5)
        if self._await_ready() >= 299:
            raise Failed("the engine did not come back within 300 s")

    def _second_load(self) -> tuple[str, Json]:
        first = self.node.model()["compile"]["seconds"]
        self.node = self._restart()
        second = self.node.model()["compile"]["seconds"]
        values = {"first_s": first, "second_s": second}
        return f"{second:.1f} s, the one before {first:.1f} s", values

    def _suspended(self) -> tuple[str, Json]:
        if not self._plan.suspend:
            raise Skipped("only with --suspend")
        tool = shutil.which("rtcwake")
        if tool is None or getattr(os, "geteuid", lambda: -1)() != 0:
            raise Skipped("needs rtcwake (util-linux) and root")
        command = [tool, "-m", "mem", "-s", "15"]
        done = subprocess.run(  # noqa: S603  (ours)
            command, capture_output=True, text=True, check=False, env=native_environment()
        )
        if done.returncode:
            raise Skipped(f"this machine does not suspend: {done.stderr.strip()[:200]}")
        self._work()
        return "the device serves after suspend and resume", {}

    def _endurance(self) -> tuple[str, Json]:
        if not self._plan.endurance_s:
            raise Skipped("left out (--quick)")
        expected, count = _content(self._work()), 0
        end = time.monotonic() + self._plan.endurance_s
        while time.monotonic() < end:
            count += 1
            if _content(self._work()) != expected:
                raise Failed(f"request {count} of the same kind got another answer")
            if count % 200 == 0:
                self._say(f"  {count} requests")
        restarts = self.node.model()["engines"][0]["restarts"]
        if restarts:
            raise Failed(f"the engine was restarted {restarts} times in {count} requests")
        return f"{count} requests in {self._plan.endurance_s / 60:.0f} minutes, all answered alike", {"requests": count}


def _vector(body: Json) -> Any:
    return np.frombuffer(base64.b64decode(body["data"][0]["embedding"]), "<f4")


def _words(text: str) -> list[str]:
    return "".join(letter if letter.isalnum() else " " for letter in text.lower()).split()


def _content(body: Json) -> str:
    """What stays the same in equal answers."""
    kept: Json = {name: body[name] for name in ("choices", "results", "text") if name in body}
    if "data" in body:
        kept["data"] = [round(number, 3) for number in body["data"][0]["embedding"]]
    return json.dumps(kept, sort_keys=True)


def _bitmap(colour: Iterable[int], size: int = 64) -> bytes:
    """A BMP of one colour."""
    red, green, blue = colour
    pixels = bytes((blue, green, red)) * (size * size)
    header = (54 + len(pixels)).to_bytes(4, "little") + bytes(4) + (54).to_bytes(4, "little")
    info = (40).to_bytes(4, "little") + size.to_bytes(4, "little") * 2 + b"\x01\x00\x18\x00" + bytes(24)
    return b"BM" + header + info + pixels
