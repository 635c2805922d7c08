"""The checks of one model on one device, in the order in which they are made; docs/certify.md says what fails each.

Begin with `Certification.run`. A check returns what it found in words and in figures, or raises `Failed` or `Skipped`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import partial
from typing import Any, Literal, NamedTuple

import httpx2
import numpy as np

from worker_node.certify import inputs
from worker_node.certify.nodes import CallFailed, Json, PromptTooLong, RunningNode
from worker_node.certify.predictions import Prediction, in_words
from worker_node.certify.reference import ANSWER_TOKENS, Reference
from worker_node.core.environment import native_environment
from worker_node.devices.memory import resident_memory
from worker_node.models.passports import CheckResult

# How much likelier (natural logarithm) the CPU may find another token than the one that the device chose, and by how
# much log probabilities may differ. `python -m benchmarks.agreement` measures both.
MARGIN = 1.0
COSINE = 0.99
# Documents whose scores on the CPU are closer than this may change places.
_EQUAL_SCORES = 0.02
# The largest prompt is found within this many tokens.
_WITHIN = 32
# Of 6 answers at once this many may differ from those one by one: their numerics differ where a batch does.
_MOST_DIFFERENT = 3
# Texts of speech and of images differ in a word here and there. This much of them must be the CPU's, and no more than
# this much more of them may be its answer to another input (shares of their letters).
_LIKENESS = 0.5
_CLEARLY_NEARER = 0.2
_GROWTH_BYTES = 200 * 2**20
# What an engine is given to serve again.
_AWAITED_S = 300.0

KILLED = "killed engine"

Found = tuple[str, Json]


class Failed(Exception):
    """A check failed; the text says what was wrong."""

    def __init__(self, detail: str, **values: Any) -> None:
        super().__init__(detail)
        self.values = values


class Skipped(Exception):
    """A check has nothing to examine here; the text says why."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is examined. `only` names the checks that are made; empty: all, which a passport needs."""

    prompts: int = 20
    texts: int = 200
    endurance_s: float = 600.0
    suspend: bool = False
    only: frozenset[str] = frozenset()


# Five minutes after compiling.
QUICK = Plan(prompts=7, texts=40, endurance_s=0.0)


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far the device's answer to a prompt is the CPU's, which finds another token likelier by `margin` where the
    answers part (0: nowhere). `logprob_error` is the largest difference of log probabilities up to there.
    """

    length: int
    tokens: int
    margin: float
    logprob_error: float | None

    @property
    def right(self) -> bool:
        """Whether numerics alone explain the difference."""
        return self.margin <= MARGIN and (self.logprob_error or 0.0) <= MARGIN


def agreement(node: RunningNode, reference: Reference, length: int, variant: int = 0, *, logprobs: bool) -> Agreement:
    """Compare the answers to a prompt up to the first token that differs: later ones continue different texts."""
    prompt = inputs.prompt(length, variant, node.tokenize)
    expected = reference.continuation(prompt)
    found, reported = node.complete(prompt, ANSWER_TOKENS, logprobs=logprobs)
    errors = []
    for at, (likeliest, logarithms) in enumerate(expected):
        token = found[at] if at < len(found) else None
        if at < len(reported) and token in likeliest:
            errors.append(abs(reported[at] - logarithms[likeliest.index(token)]))
        if token != likeliest[0]:
            # A token that is not among the likeliest is at least as far behind as the last of them.
            behind = logarithms[likeliest.index(token)] if token in likeliest else logarithms[-1]
            return Agreement(length, at, logarithms[0] - behind, max(errors, default=None))
    return Agreement(length, len(expected), 0.0, max(errors, default=None))


class Certification:
    """Makes the checks of the kind of the node's model, in the order of the tables below."""

    def __init__(
        self,
        node: RunningNode,
        reference: Reference,
        plan: Plan,
        say: Callable[[str], None],
        predictions: Sequence[Prediction] = (),
    ) -> None:
        self.node = node
        self._predictions = predictions
        self.checks: list[CheckResult] = []
        self.limit: int | None = None
        self.rates: dict[str, float | None] = {"prompt_tokens_per_s": None, "tokens_per_s": None, "texts_per_s": None}
        self.efficiency: dict[str, float] = {}
        self._reference = reference
        self._plan = plan
        self._say = say
        self._agreements: list[Agreement] = []

        model = node.model()
        self._kind: str = model["kind"]
        engine = model["engines"][0]
        self._prompt_limit: int = engine["prompt_limit"]
        # Longer prompts of a placement differ from these in the room for the answer alone.
        room: int = engine["total_limit"] - ANSWER_TOKENS - 4
        self._window = min(self._prompt_limit, room) if self._kind == "generation" else self._prompt_limit
        self._device: str = engine["device"]

    def run(self) -> None:
        """Make all checks: one that fails does not keep the next one from being made."""
        for name, check, facts in (*_FIRST, *_OF_KIND[self._kind], *_LAST):
            if self._plan.only and name not in self._plan.only:
                continue
            self._say(f"{name} …")
            began = time.monotonic()
            before = self._restarts()
            result = _result(name, partial(check, self), facts)
            if result.status == "passed" and self._restarts() > before + (name == KILLED):
                # The node runs a request again whose engine died, so no request need have failed.
                engine = self.node.model()["engines"][0]
                detail = f"the engine was restarted, {engine['restarts']} times by now; the node's log above says why"
                result = result.model_copy(update={"status": "failed", "detail": detail})
            self.checks.append(result)
            self._say(f"{name}: {result.status}, {result.detail} ({time.monotonic() - began:.0f} s)")
            if result.status == "failed":
                with contextlib.suppress(CallFailed):
                    self.node.await_ready(_AWAITED_S)

    def _restarts(self) -> int:
        try:
            return int(self.node.model()["engines"][0]["restarts"])
        except CallFailed:
            return 0

    def canary(self) -> Found:
        canary = self.node.model()["engines"][0]["canary"]
        if canary is None:
            raise Skipped("the model has none")
        return f"passed on {canary['device']}", {}

    # -- Generation ---------------------------------------------------------------------------------------------------

    def _agreement(self, length: int, variant: int = 0) -> Agreement:
        # The pipeline of an NPU reports no probabilities.
        return agreement(self.node, self._reference, length, variant, logprobs=self._device != "NPU")

    def answers(self) -> Found:
        for length in inputs.lengths(self._window, self._plan.prompts):
            found = self._agreement(length)
            self._agreements.append(found)
            self._say(f"  {length} tokens: {'agrees' if found.right else 'another answer'}")

        wrong = [each.length for each in self._agreements if not each.right]
        parted = sum(each.right and each.margin > 0 for each in self._agreements)
        errors = [each.logprob_error for each in self._agreements if each.logprob_error is not None]
        values = {
            "lengths": [each.length for each in self._agreements],
            "margins": [round(each.margin, 3) for each in self._agreements],
            "equal_tokens": [each.tokens for each in self._agreements],
            "largest_logprob_error": round(max(errors), 3) if errors else None,
            "bound": MARGIN,
        }

        count = len(self._agreements)
        longer = [each for each in self._agreements if wrong and each.length >= wrong[0]]
        if len(longer) == count or len(longer) > 2 * len(wrong):
            at = ", ".join(map(str, wrong[:8]))
            raise Failed(f"wrong answers to prompts of {at} tokens ({len(wrong)} of {count})", **values)
        said = f"{count - len(wrong)} of {count} prompts are answered as by the CPU"
        return f"{said}, {parted} of them up to a token that is nearly as likely", values

    def largest_prompt(self) -> Found:
        if not self._agreements:
            raise Skipped("agreement with the CPU was not measured")
        wrong = [each.length for each in self._agreements if not each.right]
        if not wrong:
            self.limit = self._prompt_limit
            return f"the whole window, {self._window} tokens", {"tokens": self._window}

        low, high = max((each.length for each in self._agreements if each.length < wrong[0]), default=0), wrong[0]
        if not low:
            raise Failed("not even the shortest prompt is answered rightly", tokens=0)
        while high - low > _WITHIN:
            middle = (low + high) // 2
            if all(self._agreement(middle, variant).right for variant in (0, 1)):
                low = middle
            else:
                high = middle
            self._say(f"  between {low} and {high} tokens")

        self.limit = low
        values = {"tokens": low, "wrong_from": high, "window": self._window}
        return f"{low} tokens; from {high} on answers are wrong, in a window of {self._window}", values

    def structured_output(self) -> Found:
        schema = {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 12},
                "count": {"type": "integer", "minimum": 0, "maximum": 9},
            },
            "required": ["name", "count"],
            "additionalProperties": False,
        }
        question = "Name a fruit and how many."
        form = {"type": "json_schema", "json_schema": {"name": "fruit", "schema": schema, "strict": True}}
        try:
            text = self.node.answer(question, max_tokens=64, response_format=form)["content"]
        except PromptTooLong as error:
            raise Skipped(f"the window is too small: {error.message}") from None
        _check_fruit("the answer to a strict schema", text)

        tool = {"type": "function", "function": {"name": "count", "strict": True, "parameters": schema}}
        choice = {"type": "function", "function": {"name": "count"}}
        try:
            message = self.node.answer(question, max_tokens=64, tools=[tool], tool_choice=choice)
        except PromptTooLong:
            return "an answer has the form of its strict schema; the window is too small for a tool", {}
        calls = message.get("tool_calls") or []
        if [call["function"]["name"] for call in calls] != ["count"]:
            raise Failed("the tool that had to be called was not called")
        _check_fruit("the arguments of a tool", calls[0]["function"]["arguments"])
        return "an answer has the form of its strict schema, a required tool is called", {}

    def times(self) -> Found:
        lengths = inputs.lengths(max(inputs.LENGTHS[0], min(self._window, self.limit or self._window) - 16), 5)
        first, speeds = [], []
        for length in lengths:
            # It begins as no other prompt does: a prefix cache would answer at once.
            begun = self.node.tokenize(f"Prompt {length}:")[:length]
            times = self.node.stream(begun + inputs.prompt(length, 3, self.node.tokenize)[len(begun) :], 16)
            first.append(times[0])
            if len(times) > 2:
                speeds.append((len(times) - 1) / max(1e-6, times[-1] - times[0]))

        self.rates["tokens_per_s"] = _rate(statistics.median(speeds)) if speeds else None
        self.rates["prompt_tokens_per_s"] = _rate(lengths[-1] / first[-1])
        values: Json = {"lengths": lengths, "first_token_s": [round(seconds, 3) for seconds in first], **self.rates}
        said = f"first token after {first[0]:.2f} s ({lengths[0]} tokens) to {first[-1]:.2f} s ({lengths[-1]} tokens)"
        same = (each.tokens_per_s for each in self._predictions if each.tokens == self._prompt_limit)
        values["predicted_tokens_per_s"] = expected = next(same, None)
        said += f", then {self.rates['tokens_per_s']} tokens per second"
        return said + in_words(expected, "tokens per second"), values

    def at_once(self) -> Found:
        lengths = [min(40 + index, self.limit or self._window) for index in range(6)]
        prompts = [inputs.prompt(length, index, self.node.tokenize) for index, length in enumerate(lengths)]

        def ask(prompt: list[int]) -> list[int]:
            return self.node.complete(prompt, 8)[0]

        alone = [ask(prompt) for prompt in prompts]
        with ThreadPoolExecutor(len(prompts)) as pool:
            together = list(pool.map(ask, prompts))
        different = sum(one != other for one, other in zip(alone, together, strict=True))
        if different > _MOST_DIFFERENT:
            raise Failed(f"{different} of {len(prompts)} answers at once are not those of one request at a time")
        return f"{len(prompts) - different} of {len(prompts)} answers are those of one request at a time", {}

    def cancellation(self) -> Found:
        body = {"model": self.node.id, "prompt": "Count:", "max_tokens": 100, "ignore_eos": True, "stream": True}
        with self.node.http.stream("POST", "/v1/completions", json=body) as reply:
            next((line for line in reply.iter_lines() if line.startswith("data: ")), None)
        began = time.monotonic()
        while self.node.model()["in_flight"]:
            if time.monotonic() - began > 60:
                raise Failed("a request whose caller left still ran after 60 s")
            time.sleep(0.05)
        seconds = time.monotonic() - began
        return f"a request ended {seconds:.1f} s after its caller left", {"seconds": round(seconds, 2)}

    # -- Encoders -----------------------------------------------------------------------------------------------------

    def vectors(self) -> Found:
        cosines = []
        sent = inputs.texts(self._window, self._plan.texts)

        alone = [self.node.vectors([text])[0] for text in sent]
        # The device may compute several of these at the same time.
        together = self.node.vectors(sent)
        for text, found in zip(sent * 2, alone + together, strict=True):
            expected = self._reference.vector(text)
            if found.shape != expected.shape or not np.isfinite(found).all():
                raise Failed(f"a text of {len(text.split())} words has no vector of {len(expected)} numbers")
            lengths = float(np.linalg.norm(found) * np.linalg.norm(expected))
            cosines.append(float(found @ expected) / max(1e-12, lengths))

        lowest = min(cosines)
        values = {"lowest": round(lowest, 6), "mean": round(statistics.fmean(cosines), 6), "bound": COSINE}
        wrong = [text for text, cosine in zip(sent * 2, cosines, strict=True) if cosine < COSINE]
        if wrong:
            sizes = sorted(len(text.split()) for text in wrong)
            span = f"{sizes[0]} to {sizes[-1]} words"
            raise Failed(
                f"{len(wrong)} of {len(cosines)} vectors ({span}) are not the CPU's: cosine {lowest:.3f}", **values
            )
        return f"{len(sent)} vectors are the CPU's, alone and together: cosine {lowest:.5f} or more", values

    def texts(self) -> Found:
        body = {"input": inputs.texts(self._window, 64), "encoding_format": "base64"}
        self.node.post("/v1/embeddings", body)
        began = time.monotonic()
        tokens = self.node.post("/v1/embeddings", body)["usage"]["prompt_tokens"]
        seconds = time.monotonic() - began
        self.rates["texts_per_s"] = _rate(len(body["input"]) / seconds)
        self.rates["prompt_tokens_per_s"] = _rate(tokens / seconds)
        return f"{self.rates['texts_per_s']:.0f} texts of all lengths per second", dict(self.rates)

    def order(self) -> Found:
        documents = inputs.DOCUMENTS
        for query in inputs.RANKED:
            expected, found = self._reference.scores(query, documents), self.node.scores(query, documents)
            for first, second in np.ndindex(len(documents), len(documents)):
                if expected[first] - expected[second] > _EQUAL_SCORES and found[first] < found[second]:
                    raise Failed(f"documents {first} and {second} of {query!r} are not in the CPU's order")
        return f"{len(inputs.RANKED)} queries rank {len(documents)} documents as the CPU does", {}

    # -- Speech and images --------------------------------------------------------------------------------------------

    def recordings(self) -> Found:
        first, second = inputs.recordings()
        turns = self._in_turn([first, second], self._reference.transcript, self.node.transcript)
        return f"{turns} turns of two recordings, each with its own text", {"turns": turns}

    def images(self) -> Found:
        images = list(inputs.images())
        turns = self._in_turn(images, self._reference.description, self.node.description)
        return f"{turns} turns of {len(images)} images, each with its own answer", {"turns": turns}

    def _in_turn(self, things: Sequence[Any], expect: Callable[[Any], str], ask: Callable[[Any], str]) -> int:
        """Ask about each thing, in this order, back, and once more: each answer must be the CPU's to that thing."""
        expected = [expect(thing).lower() for thing in things]
        order = [*range(len(things)), *reversed(range(len(things))), *range(len(things))]
        for turn, which in enumerate(order):
            found = ask(things[which]).lower()
            likeness = [SequenceMatcher(None, found, text, autojunk=False).ratio() for text in expected]
            nearest = max(range(len(things)), key=likeness.__getitem__)
            where = f"turn {turn + 1} of {len(order)}"
            if likeness[nearest] - likeness[which] > _CLEARLY_NEARER:
                before = turn and nearest == order[turn - 1]
                raise Failed(f"{where}: the answer to {'the input before' if before else 'another input'}")
            if likeness[which] < _LIKENESS:
                raise Failed(f"{where}: another answer than the CPU's ({likeness[which]:.2f} alike)")
        return len(order)

    # -- The device ---------------------------------------------------------------------------------------------------

    def _work(self) -> Json:
        if self._kind == "transcription":
            return self.node.transcribe(inputs.recordings()[0])
        message = [{"role": "user", "content": "Say yes."}]
        calls: dict[str, tuple[str, Json]] = {
            "embedding": ("/v1/embeddings", {"input": ["one ordinary text"]}),
            "rerank": ("/v1/rerank", {"query": inputs.RANKED[0], "documents": inputs.DOCUMENTS[:2]}),
            "vision": ("/v1/chat/completions", {"messages": message, "max_tokens": 4, "temperature": 0}),
            "generation": (
                "/v1/completions",
                {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0},
            ),
        }
        return self.node.post(*calls[self._kind])

    def _pid(self) -> int:
        engine = self.node.model()["engines"][0]
        if engine["pid"] is None:
            raise Failed(f"the engine has no process: {engine['reason']}")
        return int(engine["pid"])

    def busy_counter(self) -> Found:
        if self._device != "NPU":
            raise Skipped("this device has no busy counter")
        before, began = self.node.health()["npu"], time.monotonic()
        body = self._work()
        busy = body["_busy_us"]
        took = (time.monotonic() - began) * 1e6
        if before["busy_time_us"] is None:
            raise Failed(f"the busy counter cannot be read: {before['reasons'].get('busy_time_us')}")
        if not busy:
            raise Failed("the busy counter stood still while the device worked: nothing proves where this was computed")
        if busy > took * 1.05 + 2_000:
            raise Failed(f"the busy counter moved by {busy} µs in a request of {took:.0f} µs: others use the device")

        expected = None
        if self._kind == "embedding":
            # The text runs in the shortest length that holds it.
            tokens = body["usage"]["prompt_tokens"]
            expected = next((each.ms for each in self._predictions if each.tokens >= tokens), None)
        values = {"busy_us": busy, "request_us": round(took), "predicted_ms": expected}
        said = f"{busy / 1e3:.1f} ms busy in a request of {took / 1e3:.1f} ms"
        return said + in_words(expected, "ms"), values

    def energy(self) -> Found:
        # The native replies say why there is no figure.
        if self._kind == "generation":
            tokens = min(64, self._window)
            body = {"prompt": "Count:", "max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
            reply = self.node.post("/inference", body)
            count, what = reply["usage"]["completion_tokens"], "tokens"
        elif self._kind == "embedding":
            texts = inputs.texts(self._window, 64)
            # What the node had from its cache would cost nothing.
            reply = self.node.post("/embeddings", {"texts": texts})
            count, what = len(texts), "texts"
        else:
            reply, count, what = self._work(), 1, "requests"

        joules = reply["_joules"]
        if joules is None:
            npu = self.node.health()["npu"]["reasons"].get("energy_uj") if self._device == "NPU" else None
            raise Skipped(reply.get("joules_reason") or npu or "no counter of this device's energy can be read")
        if what != "requests":
            self.efficiency[f"{what}_per_joule"] = round(count / joules, 4)
        whose = "the NPU" if self._device == "NPU" else "the processor's package"
        return f"{joules:.3f} J of {whose} for {count} {what}", {"joules": joules, what: count}

    def memory(self) -> Found:
        pid = self._pid()
        before = resident_memory(pid)
        if before is None:
            raise Skipped("this system does not report the memory of a process")
        for _ in range(5):
            self._work()
        after = resident_memory(pid) or 0
        values = {"engine_bytes": after, "growth_bytes": after - before}
        if after - before > max(_GROWTH_BYTES, before // 4):
            raise Failed(f"the engine grew by {(after - before) / 2**20:.0f} MB in five requests", **values)
        return f"the engine has {after / 2**20:.0f} MB", values

    def killed_engine(self) -> Found:
        pid = self._pid()
        os.kill(pid, getattr(signal, "SIGKILL", signal.SIGTERM))
        began = time.monotonic()
        while (engine := self.node.model()["engines"][0])["pid"] in {pid, None}:
            if time.monotonic() - began > _AWAITED_S or engine["state"] in {"quarantined", "failed"}:
                raise Failed(f"the engine was not started again: {engine['reason']}")
            time.sleep(0.05)
        self.node.await_ready(_AWAITED_S)
        self._work()
        seconds = time.monotonic() - began
        return f"the next request was answered {seconds:.1f} s after the kill", {"seconds": round(seconds, 2)}

    def second_load(self) -> Found:
        first = self.node.model()["compile"]["seconds"]
        self.node.restart()
        second = self.node.model()["compile"]["seconds"]
        return f"{second:.1f} s; the load before took {first:.1f} s", {"first_s": first, "second_s": second}

    def suspend(self) -> Found:
        if not self._plan.suspend:
            raise Skipped("only with --suspend")

        tool = shutil.which("rtcwake")
        if tool is None or getattr(os, "geteuid", lambda: -1)() != 0:
            raise Skipped("needs rtcwake (util-linux) and root")
        done = subprocess.run(  # noqa: S603  (ours)
            [tool, "-m", "mem", "-s", "15"], capture_output=True, text=True, check=False, env=native_environment()
        )
        if done.returncode:
            raise Skipped(f"this machine does not suspend: {done.stderr.strip()[:200]}")
        self._work()
        return "the device serves after suspend and resume", {}

    def endurance(self) -> Found:
        if not self._plan.endurance_s:
            raise Skipped("left out (--quick)")
        expected, count = _content(self._work()), 0
        until = time.monotonic() + self._plan.endurance_s
        while time.monotonic() < until:
            count += 1
            if _content(self._work()) != expected:
                raise Failed(f"request {count} of equal ones got another answer", requests=count)
            if count % 200 == 0:
                self._say(f"  {count} requests")
        minutes = self._plan.endurance_s / 60
        return f"{count} requests in {minutes:.0f} minutes, all with the same answer", {"requests": count}


class _Planned(NamedTuple):
    """A check by its name; `facts` are the numbers of docs/npu-facts.md that it is about."""

    name: str
    check: Callable[[Certification], Found]
    facts: tuple[int, ...] = ()


_FIRST = (_Planned("canary", Certification.canary, (1,)),)
_OF_KIND: Mapping[str, Sequence[_Planned]] = {
    "generation": (
        _Planned("agreement with the CPU", Certification.answers, (1, 5, 6)),
        _Planned("largest right prompt", Certification.largest_prompt, (4, 9)),
        _Planned("structured output", Certification.structured_output),
        _Planned("time by prompt length", Certification.times, (10,)),
        _Planned("requests at once", Certification.at_once, (12,)),
        _Planned("cancellation", Certification.cancellation),
    ),
    "embedding": (
        _Planned("agreement with the CPU", Certification.vectors, (1, 2, 13, 36)),
        _Planned("texts per second", Certification.texts),
    ),
    "rerank": (_Planned("agreement with the CPU", Certification.order, (2, 13, 36)),),
    "transcription": (_Planned("two recordings in turn", Certification.recordings, (3, 7)),),
    # No structured output: vision models refuse it.
    "vision": (_Planned("images in turn", Certification.images, (12,)),),
}
_LAST = (
    _Planned("busy counter", Certification.busy_counter, (18, 20)),
    _Planned("energy", Certification.energy, (27, 30)),
    _Planned("memory", Certification.memory, (14,)),
    _Planned(KILLED, Certification.killed_engine, (20,)),
    _Planned("second load", Certification.second_load, (14, 15, 16)),
    _Planned("suspend and resume", Certification.suspend, (19,)),
    _Planned("endurance", Certification.endurance),
)
KINDS = frozenset(_OF_KIND)
CHECKS = {"doctor", "load"} | {planned.name for each in (_FIRST, *_OF_KIND.values(), _LAST) for planned in each}


def _result(name: str, check: Callable[[], Found], facts: tuple[int, ...]) -> CheckResult:
    status: Literal["passed", "failed", "skipped"]
    try:
        status, (detail, values) = "passed", check()
    except Skipped as reason:
        status, detail, values = "skipped", str(reason), {}
    except Failed as problem:
        status, detail, values = "failed", str(problem), problem.values
    except CallFailed as error:
        status, detail, values = "failed", error.message, {}
    except (KeyError, IndexError, TypeError, ValueError, httpx2.HTTPError, OSError) as error:
        # What the node replied has another form than it should have.
        status, detail, values = "failed", f"{type(error).__name__}: {error}", {}
    return CheckResult(name=name, status=status, detail=detail[:1000], facts=list(facts), values=values)


def _rate(measured: float) -> float:
    """As passports have them."""
    return max(0.01, round(measured, 2))


def _check_fruit(what: str, text: str) -> None:
    try:
        value = json.loads(text)
    except ValueError:
        raise Failed(f"{what} is not JSON") from None
    wrong = not isinstance(value, dict) or set(value) != {"name", "count"} or type(value["count"]) is not int
    if wrong or not isinstance(value["name"], str) or not 0 <= value["count"] <= 9:
        raise Failed(f"{what} does not match the schema")


def _content(body: Json) -> str:
    """What equal requests have in common in their replies."""
    kept: Json = {name: body[name] for name in ("choices", "results", "text") if name in body}
    if "data" in body:
        kept["data"] = [round(number, 3) for number in body["data"][0]["embedding"]]
    return json.dumps(kept, sort_keys=True)
