"""The NPU's busy time in the last object of a stream, the same in every dialect."""

import pytest

from worker_node.core.types import Device, Finished, FinishReason, Route, Timing, Usage
from worker_node.http.context import busy_fields, busy_time
from worker_node.http.ollama import Loading, ending
from worker_node.tasks.generate.http.responses import Items, _Response
from worker_node.tasks.generate.http.responses_body import ResponsesBody


def end(busy_us=None, *, shared=False):
    return Finished(FinishReason.STOP, Usage(3, 2), Timing(0.0, 0.1, 5.0, 6.0, 2.0), busy_us, shared)


@pytest.mark.parametrize(
    ("ends", "fields"),
    [
        ([end()], {}),
        ([end(0)], {"npu_busy_delta_us": 0}),
        ([end(40)], {"npu_busy_delta_us": 40}),
        ([end(40), end(2), end()], {"npu_busy_delta_us": 42}),
        ([end(40), end(2, shared=True)], {"npu_busy_delta_us": 42, "npu_busy_exclusive": False}),
        ([end(shared=True)], {}),
    ],
)
def test_the_busy_time_is_told_where_it_was_measured_and_never_called_exclusive(ends, fields):
    assert busy_fields(iter(ends)) == fields
    assert busy_time(ends) == fields.get("npu_busy_delta_us")


@pytest.mark.parametrize("shared", [True, False])
def test_ollamas_last_frame_and_openais_response_have_the_native_fields(shared):
    finished = end(40, shared=shared)
    route = Route("m", Device.NPU, "preferred", 3)
    body = ResponsesBody.read(b'{"model": "m", "input": "x"}')
    for last in (ending(finished, Loading()), _Response(body, route, stored=False).ended(Items(), finished)):
        assert last["npu_busy_delta_us"] == 40
        assert ("npu_busy_exclusive" in last) == shared
