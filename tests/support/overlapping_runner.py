"""The NPU's engine of encoders over scripted infer requests, which the device works on at the same time.

In an engine process a run takes `RUN_S`, and the first token of a text picks its fault: POISON breaks the process,
RAISE fails the run, HANG never ends. The vector of a text is its first token and its length.
"""

import threading
from types import SimpleNamespace

import numpy as np

from tests.support.scripted_runner import HANG, POISON, RAISE, die
from worker_node.encoders.static import StaticEncoder

RUNNER = "tests.support.overlapping_runner:TimedEncoder"
RUN_S = 0.1
RECOMMENDED = 4


class Request:
    """An infer request whose run ends when `end` is called."""

    def __init__(self, started):
        self._started, self._error = started, None

    def set_callback(self, callback, data):
        self._callback, self._data = callback, data

    def start_async(self, inputs):
        self.inputs, self._error = inputs, None
        self._started(self)

    @property
    def first(self):
        return int(self.inputs["input_ids"][0, 0])

    def end(self, error=None):
        self._error = error
        self._callback(self._data)

    def wait(self):
        if self._error is not None:
            raise RuntimeError(self._error)

    def get_output_tensor(self, _index):
        ids, mask = self.inputs["input_ids"], self.inputs["attention_mask"]
        return SimpleNamespace(data=np.stack([ids[:, 0], mask.sum(axis=1)], axis=1).astype("<f4"))


class Compiled:
    """A compiled model; it has memory for `most` requests."""

    inputs = ()

    def __init__(self, started, most=64):
        self._started, self._most = started, most

    def create_infer_request(self):
        self._most -= 1
        if self._most < 0:
            raise RuntimeError("ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY")
        return Request(self._started)

    def get_property(self, name):
        return {"OPTIMAL_NUMBER_OF_INFER_REQUESTS": RECOMMENDED}[name]


class ScriptedEncoder(StaticEncoder):
    """`begun` are the requests whose runs have begun and that have not been ended by the test."""

    memory_for = 64

    def __init__(self, spec):
        super().__init__(spec)
        self.begun = []

    def _models(self, _core, _blobs):
        for length in self._options.npu_buckets:
            yield length, Compiled(self.begin, self.memory_for)

    def begin(self, request):
        self.begun.append(request)

    def end(self, first, error=None):
        """End the run of the text with this first token."""
        request = next(request for request in self.begun if request.first == first)
        self.begun.remove(request)
        request.end(error)


class TimedEncoder(ScriptedEncoder):
    def begin(self, request):
        if request.first != HANG:
            threading.Timer(RUN_S, self._run, [request]).start()

    def _run(self, request):
        if request.first == POISON:
            die()
        request.end("the device is lost" if request.first == RAISE else None)
