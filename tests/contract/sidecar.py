"""The bounded profile in a process of its own, and a script for the NPU's busy counter."""

import contextlib
import fcntl
import http.client
import json
import os
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from tests.support.nodes import engine_processes, started


@dataclass
class Counter:
    """`npu_busy_time_us` in a directory of its own; it ticks unless told otherwise."""

    directory: Path
    value: int = 1_000_000
    ticks: bool = True

    def __post_init__(self):
        self.file = self.directory / "npu_busy_time_us"
        self._over, self._lock = threading.Event(), threading.Lock()
        self.write(self.value)
        self._thread = threading.Thread(target=self._tick)
        self._thread.start()

    def write(self, value):
        """Replace the file in one step, so that no reader sees half a number."""
        self.value = value
        fresh = self.directory / "fresh"
        fresh.write_text(f"{value}\n")
        fresh.replace(self.file)

    def _tick(self):
        # Often: the shortest generation must see it move, on a core that the engine uses, too.
        while not self._over.wait(0.005):
            with self._lock:
                if self.ticks:
                    self.write(self.value + 1000)

    @contextlib.contextmanager
    def still(self):
        """The counter is the test's alone inside the block."""
        with self._lock:
            self.ticks = False
        try:
            yield self
        finally:
            if self.file.is_dir():
                self.file.rmdir()
            self.write(self.value)
            self.ticks = True

    def close(self):
        self._over.set()
        self._thread.join()


@dataclass
class Sidecar:
    """A running sidecar; `log` is all that it and its engine wrote to standard error."""

    process: subprocess.Popen
    url: str
    log: Path
    lock: Path
    counter: Counter

    def request(self, method, path, body=None, headers=None):
        """Return status and JSON. A job during which this process was not run, so that the counter stood still while it
        should tick, is sent again."""
        for _ in range(20):
            status, reply = self._send(method, path, body, headers)
            stood_still = status == 503 and reply.get("npu_busy_delta_us") == 0
            if not (stood_still and self.counter.ticks):
                break
        return status, reply

    def _send(self, method, path, body, headers):
        parts = urlsplit(self.url)
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=300)
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data, headers or {})
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read())
        finally:
            connection.close()

    def health(self):
        return self.request("GET", "/healthz")

    def generate(self, job="title", text="The sea is calm today.", tokens=6, **more):
        return self.request(
            "POST", "/v1/worker/generate", {"job": job, "input": text, "max_new_tokens": tokens, **more}
        )

    def wait_until(self, condition, timeout=240.0):
        deadline = time.monotonic() + timeout
        while not condition(body := self.health()[1]):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, f"still {body}"
            time.sleep(0.1)
        return body

    @property
    def engine(self):
        (engine,) = engine_processes(self.process.pid)
        return psutil.Process(engine)

    @contextlib.contextmanager
    def stopped_engine(self):
        """The engine stands still inside the block: a job that runs is not over, however slow the test is."""
        engine = self.engine
        engine.suspend()
        try:
            yield engine
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                engine.resume()

    def wait_for_a_generation(self):
        """Return when a job holds the NPU and has read the counter."""
        while not self.is_locked():
            time.sleep(0.005)
        self.health()  # the counter is read in the same turn of the loop in which the lock was had

    def is_locked(self):
        with self.lock.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False


@contextlib.contextmanager
def start_sidecar(directory, *arguments, **environment):
    """A sidecar on a free loopback port with the emulated NPU and a scripted counter; ended with the block."""
    (directory / "counter").mkdir()
    counter = Counter(directory / "counter")
    log = directory / "log"
    lock = directory / "lock"
    variables = {"NPU_NODE_NPU_EMULATION": "1", "NPU_NODE_NPU_SYSFS": str(counter.directory)}
    variables |= {"OV_GENAI_NPU_PORT": "0", "OV_GENAI_NPU_LOCK": str(lock)}
    command, env = ("serve", "--profile", "bounded", *arguments), os.environ | variables | environment
    with contextlib.closing(counter), log.open("w") as stderr, started(command, env, stderr) as process:
        line = process.stdout.readline()
        assert line.startswith("listening on http://127.0.0.1:"), log.read_text()
        yield Sidecar(process, line.split()[-1], log, lock, counter)
