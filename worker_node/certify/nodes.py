"""The nodes that a certification runs: one on the device in question, one on the CPU that it is compared with."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import httpx2

from worker_node.core.errors import NodeError
from worker_node.core.types import Device
from worker_node.settings import ModelSettings

Json = dict[str, Any]
_LOOK_S = 0.2
_STOP_S = 45.0
# Of the node that is certified only these hold; where it listens and who may call it is the certification's own matter.
_NOT_PASSED_ON = frozenset({
    "NPU_NODE_API_KEYS", "NPU_NODE_API_KEYS_FILE", "NPU_NODE_HOST", "NPU_NODE_PORT", "NPU_NODE_OLLAMA_PORT",
    "NPU_NODE_TLS_CERT", "NPU_NODE_TLS_KEY", "NPU_NODE_TLS_CLIENT_CA", "NPU_NODE_ANNOUNCE", "NPU_NODE_AGENT_CHECK_PORT",
    "NPU_NODE_MODELS", "NPU_NODE_FAULTS", "NPU_NODE_REQUIRE_CERTIFIED", "NOTIFY_SOCKET",
})  # fmt: skip


class CallFailed(NodeError):
    """A call of the certified node failed; the text says how."""


class RunningNode:
    """`npu-node serve` with one model on one device, as a process of its own on a free port of this machine.

    `say` is told how the load goes. Raises CallFailed when the model cannot be loaded.
    """

    def __init__(
        self,
        model: ModelSettings,
        device: Device,
        say: Callable[[str], None],
        variables: Mapping[str, str] | None = None,
        flags: tuple[str, ...] = (),
    ) -> None:
        place: Json = {"device": device.value}
        for given in model.placements or ():
            if given.device is device:
                place = given.model_dump(mode="json", exclude_unset=True) | {"load": "eager"}
        wanted = model.model_dump(mode="json", exclude_unset=True, exclude={"options", "idle_unload_s"})
        wanted |= {**model.options, "placements": [place]}
        kept = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED_ON}
        environment = {
            **kept,
            "NPU_NODE_MODELS": json.dumps([wanted], default=str),
            "NPU_NODE_SAMPLING_DEFAULTS": "greedy",
            # A canary in the middle of a measurement would be measured.
            "NPU_NODE_CANARY_INTERVAL_S": "86400",
            **(variables or {}),
        }
        command = [sys.executable, "-m", "worker_node", "serve", "--host", "127.0.0.1", "--port", "0"]
        self.process = subprocess.Popen(  # noqa: S603  (ours)
            [*command, "--log-level", "error", *flags], env=environment, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None  # noqa: S101
        line = self.process.stdout.readline()
        if not line.startswith("listening on "):
            self.stop()
            raise CallFailed("the node did not start; its log above says why")
        self.url = line.split()[-1]
        self.http = httpx2.Client(base_url=self.url, timeout=900.0)
        try:
            self._await_model(say)
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the process and its engines."""
        if hasattr(self, "http"):
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

    def _await_model(self, say: Callable[[str], None]) -> None:
        began, said = time.monotonic(), 0.0
        while True:
            model = self.model()
            if model["state"] in {"ready", "degraded"} and model["device"] is not None:
                return
            if model["state"] in {"failed", "quarantined"}:
                raise CallFailed(f"the model is {model['state']}: {model['reason']}")
            if self.process.poll() is not None:
                raise CallFailed(f"the node ended with status {self.process.returncode} while the model was loaded")
            waited = time.monotonic() - began
            if waited - said >= 15:
                said = waited
                say(f"loading and compiling for {waited:.0f} s ({model['state']})")
            time.sleep(_LOOK_S)

    def model(self) -> Json:
        """What /health says of the model."""
        found: Json = self.health()["models"][0]
        return found

    def health(self) -> Json:
        """/health, whatever its status."""
        try:
            found: Json = self.http.get("/health").json()
        except (httpx2.HTTPError, ValueError) as error:
            raise CallFailed(f"the node does not answer ({type(error).__name__})") from None
        return found

    def get(self, path: str) -> Json:
        """A resource. Raises CallFailed."""
        return self._read(lambda: self.http.get(path))

    def post(self, path: str, body: Json) -> Json:
        """A call with a JSON body. Raises CallFailed."""
        return self._read(lambda: self.http.post(path, json=body))

    def upload(self, path: str, content: bytes, model: str) -> Json:
        """A recording as a form. Raises CallFailed."""
        form = {"file": ("recording.wav", content, "audio/wav")}
        return self._read(lambda: self.http.post(path, files=form, data={"model": model, "temperature": "0"}))

    def _read(self, send: Callable[[], httpx2.Response]) -> Json:
        try:
            reply = send()
            body: Json = reply.json()
        except (httpx2.HTTPError, ValueError) as error:
            raise CallFailed(f"the node broke the call off ({type(error).__name__})") from None
        if reply.status_code != 200:
            raise CallFailed(f"HTTP {reply.status_code}: {str(body.get('error', body))[:300]}")
        busy = reply.headers.get("X-NPU-Busy-Delta-Us")
        return body | {"_busy_us": int(busy) if busy and busy.isdigit() else None}


class Reference:
    """Answers of a CPU: of a file (`stored`), else of a node that is started here when the first one is asked for."""

    def __init__(self, start: Callable[[], RunningNode], stored: Path | None, key: str) -> None:
        self._start = start
        self._node: RunningNode | None = None
        self._key = key
        self._answers: dict[str, Json] = {}
        self.asked_here = False
        if stored is not None:
            try:
                found = json.loads(stored.read_text(encoding="utf-8"))
                if found["key"] != key:
                    raise CallFailed(f"{stored} holds answers of another model or OpenVINO; leave --reference out")
                self._answers = found["answers"]
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise CallFailed(f"{stored} must be a file of --make-reference, and cannot be read: {error}") from None

    def post(self, path: str, body: Json) -> Json:
        """The CPU's answer to a call."""
        return self._answer(json.dumps([path, body], sort_keys=True), lambda node: node.post(path, body))

    def upload(self, path: str, content: bytes, model: str) -> Json:
        """The CPU's answer to a form with a recording."""
        name = json.dumps([path, hashlib.sha256(content).hexdigest()])
        return self._answer(name, lambda node: node.upload(path, content, model))

    def _answer(self, name: str, ask: Callable[[RunningNode], Json]) -> Json:
        digest = hashlib.sha256(name.encode()).hexdigest()
        if digest not in self._answers:
            self.asked_here = True
            self._node = self._node or self._start()
            self._answers[digest] = ask(self._node)
        return self._answers[digest]

    def save(self, path: Path) -> None:
        """Write what was answered, for --reference of another machine."""
        path.write_text(json.dumps({"key": self._key, "answers": self._answers}) + "\n", encoding="utf-8")

    def close(self) -> None:
        """End the node, if one was started."""
        if self._node is not None:
            self._node.stop()
            self._node = None
