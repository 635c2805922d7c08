"""The nodes that a certification runs: one on the device in question, one on the CPU that it is compared with."""

from __future__ import annotations

import base64
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx2
import numpy as np
import numpy.typing as npt

from worker_node.core.errors import NodeError
from worker_node.core.operating_system import tethered
from worker_node.devices.npu import MOST_PROMPT_TOKENS
from worker_node.settings import ModelSettings, NodeSettings, PlacementSettings

Json = dict[str, Any]
_POLL_S = 0.2
_STOP_S = 45.0
_PROGRESS_S = 15.0
_VARIABLES = ("NPU_NODE_", "NPU_PROXY_", "NOTIFY_SOCKET", "WATCHDOG_")
# Of the settings these count for the examined node too: where its files are, and how engines are run and watched. Keys,
# addresses and what else a service does for its callers do not concern it.
_SHARED = frozenset({
    "model_store", "compile_cache", "npu_sysfs", "energy_sysfs", "npu_emulation", "npu_token_limit", "faults",
    "allow_faults",
    "load_timeout_s", "watchdog_s", "run_timeout_s", "quarantine_s", "crash_limit", "crash_window_s",
    "engine_memory_growth", "engine_nice", "max_body_bytes", "max_image_body_bytes",
})  # fmt: skip
_OWN = {
    # No passport decides what is examined, least of all an earlier failure.
    "passports": "/nonexistent/passports",
    "sampling_defaults": "greedy",
    # What comes from a cache says nothing of the device.
    "embedding_cache": 0,
    # A canary in the middle of a measurement would be measured.
    "canary_interval_s": 86_400,
    "request_timeout_s": 900,
    "host": "127.0.0.1",
    "port": 0,
}


class CallFailed(NodeError):
    """A call of a node that a certification runs failed; the text says how."""


class PromptTooLong(CallFailed):
    """A prompt does not fit the placement's window."""


class RunningNode:
    """`npu-node serve` with one model at one placement, as a process of its own on a free port of this machine.

    `say` reports how the load goes. Raises CallFailed when the model cannot be loaded; so do all calls.
    """

    def __init__(
        self, model: ModelSettings, place: PlacementSettings, settings: NodeSettings, say: Callable[[str], None]
    ) -> None:
        wanted = model.model_dump(mode="json", exclude_unset=True, exclude={"options", "idle_unload_s", "placements"})
        wanted |= {**model.examined_options(), "placements": [place.model_dump(mode="json", exclude_unset=True)]}
        shared = settings.model_dump(mode="json", include=set(_SHARED), exclude_none=True)
        # What is proven here is how long prompts may be.
        given = {"npu_token_limit": MOST_PROMPT_TOKENS, **shared, **_OWN, "models": [wanted]}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(_VARIABLES)}
        self._environment = {**inherited, "NPU_NODE_CONFIG": ""} | {
            f"NPU_NODE_{name.upper()}": value if isinstance(value, str) else json.dumps(value, default=str)
            for name, value in given.items()
        }
        self._say = say
        self._tokenized: dict[str, list[int]] = {}
        self._start()
        self.id: str = self.model()["id"]

    def _start(self) -> None:
        command = [sys.executable, "-m", "worker_node", "serve", "--log-level", "error"]
        self.process = subprocess.Popen(  # noqa: S603  (ours)
            tethered(command), env=self._environment, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None  # noqa: S101
        line = self.process.stdout.readline()
        self.http = httpx2.Client(base_url=line.split()[-1] if line else "", timeout=900.0)
        try:
            if not line.startswith("listening on "):
                raise CallFailed("the node did not start; its log above says why")
            self.await_ready()
        except BaseException:
            self.close()
            raise

    def restart(self) -> None:
        self.close()
        self._start()

    def close(self) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def await_ready(self, limit_s: float = math.inf) -> None:
        """Wait until the model serves. Raises CallFailed when it does not become ready, or not within the limit."""
        began, said = time.monotonic(), 0.0
        while (waited := time.monotonic() - began) < limit_s:
            model = self.model()
            if model["state"] in {"ready", "degraded"} and model["device"] is not None:
                return
            if model["state"] in {"failed", "quarantined"}:
                raise CallFailed(f"the model is {model['state']}: {model['reason']}")
            if waited - said >= _PROGRESS_S:
                said = waited
                self._say(f"loading and compiling for {waited:.0f} s")
            time.sleep(_POLL_S)
        raise CallFailed(f"the model did not serve within {limit_s:.0f} s")

    def health(self) -> Json:
        try:
            found: Json = self.http.get("/health").json()
        except (httpx2.HTTPError, ValueError) as error:
            raise CallFailed(f"the node does not answer ({type(error).__name__})") from None
        return found

    def model(self) -> Json:
        found: Json = self.health()["models"][0]
        return found

    def post(self, path: str, body: Json) -> Json:
        return self._read(lambda: self.http.post(path, json={"model": self.id, **body}))

    def tokenize(self, text: str) -> list[int]:
        if text not in self._tokenized:
            self._tokenized[text] = self.post("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
        return self._tokenized[text]

    def complete(self, prompt: list[int], tokens: int, *, logprobs: bool = False) -> tuple[list[int], list[float]]:
        """The `tokens` that greedily continue the prompt, and their log probabilities where they were asked for."""
        body: Json = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body |= {"return_token_ids": True} | ({"logprobs": 1} if logprobs else {})
        choice = self.post("/v1/completions", body)["choices"][0]
        # Special tokens, which have no text, have none either.
        found = choice["logprobs"]["token_logprobs"] if logprobs else []
        return choice["token_ids"], found if len(found) == len(choice["token_ids"]) else []

    def stream(self, prompt: list[int], tokens: int) -> list[float]:
        """The seconds after which each part of the text of a streamed completion came."""
        body = {"model": self.id, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True}
        began, times = time.monotonic(), []
        try:
            with self.http.stream("POST", "/v1/completions", json=body) as reply:
                if reply.status_code != 200:
                    raise CallFailed(f"HTTP {reply.status_code} for a stream: {reply.read().decode()[:200]}")
                for line in reply.iter_lines():
                    event = json.loads(line[6:]) if line.startswith("data: {") else {}
                    if "error" in event:
                        raise CallFailed(f"the stream failed: {str(event['error'])[:200]}")
                    if event.get("choices") and event["choices"][0].get("text"):
                        times.append(time.monotonic() - began)
        except (httpx2.HTTPError, ValueError) as error:
            raise CallFailed(f"the node broke the stream off ({type(error).__name__})") from None
        if not times:
            raise CallFailed("the stream had no text")
        return times

    def answer(self, content: str | list[Json], **fields: Any) -> Json:
        """The message that answers one of the user, without sampling."""
        body = {"messages": [{"role": "user", "content": content}], "temperature": 0, **fields}
        message: Json = self.post("/v1/chat/completions", body)["choices"][0]["message"]
        return message

    def vectors(self, texts: Sequence[str]) -> list[npt.NDArray[np.float32]]:
        """The vectors of one request, in which they may be computed at the same time."""
        rows = self.post("/v1/embeddings", {"input": list(texts), "encoding_format": "base64"})["data"]
        return [np.frombuffer(base64.b64decode(row["embedding"]), "<f4") for row in rows]

    def scores(self, query: str, documents: Sequence[str]) -> list[float]:
        rows = self.post("/v1/rerank", {"query": query, "documents": list(documents)})["results"]
        return [row["relevance_score"] for row in sorted(rows, key=lambda row: row["index"])]

    def transcript(self, recording: bytes) -> str:
        return str(self.transcribe(recording)["text"])

    def transcribe(self, recording: bytes) -> Json:
        form = {"file": ("recording.wav", recording, "audio/wav")}
        fields = {"model": self.id, "temperature": "0"}
        return self._read(lambda: self.http.post("/v1/audio/transcriptions", files=form, data=fields))

    def description(self, image: str) -> str:
        parts: list[Json] = [
            {"type": "image_url", "image_url": {"url": image}},
            {"type": "text", "text": "Which colour is this?"},
        ]
        return str(self.answer(parts, max_tokens=12)["content"])

    def _read(self, send: Callable[[], httpx2.Response]) -> Json:
        try:
            reply = send()
            body: Json = reply.json()
        except (httpx2.HTTPError, ValueError) as error:
            raise CallFailed(f"the node broke the call off ({type(error).__name__})") from None
        if reply.status_code != 200:
            said = body.get("error", body)
            too_long = isinstance(said, dict) and said.get("code") == "context_length_exceeded"
            raise (PromptTooLong if too_long else CallFailed)(f"HTTP {reply.status_code}: {str(said)[:300]}")
        busy = reply.headers.get("X-NPU-Busy-Delta-Us")
        joules = reply.headers.get("X-NPU-Node-Joules")
        return body | {
            "_busy_us": int(busy) if busy and busy.isdigit() else None,
            "_joules": None if joules is None else float(joules),
        }
