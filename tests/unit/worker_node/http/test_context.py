"""Headers that every dialect has, in requests and replies."""

import math
from types import SimpleNamespace

import pytest
from aiohttp.test_utils import make_mocked_request

from worker_node.core.errors import BadRequest, DeadlineExceeded
from worker_node.core.types import Busy, Device, Timing, Usage
from worker_node.http.context import STATE, RequestState, busy_fields, busy_of, request_context
from worker_node.settings import NodeSettings
from worker_node.tasks.generate.blocks import Finished, FinishReason


def context(**headers):
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    node = SimpleNamespace(settings=NodeSettings(request_timeout_s=180))
    request = make_mocked_request("POST", "/embeddings", headers=headers)
    request[STATE] = RequestState(node, "req_1", 100.0)
    return request_context(request)


@pytest.mark.parametrize(
    ("headers", "interactive", "device", "deaths"),
    [
        ({}, True, None, 0),
        ({"X_Priority": "Batch ", "X_NPU_Require_Device": "npu"}, False, Device.NPU, 0),
        ({"X_Priority": "interactive", "X_NPU_Engine_Deaths": "1"}, True, None, 1),
    ],
)
def test_priority_device_and_deaths_are_those_of_the_headers(headers, interactive, device, deaths):
    found = context(**headers)
    assert (found.interactive, found.require_device, found.engine_deaths) == (interactive, device, deaths)


@pytest.mark.parametrize(
    ("headers", "deadline", "ends"),
    [
        ({}, 280.0, math.inf),
        ({"X_NPU_Start_Timeout_Ms": "2500"}, 102.5, math.inf),
        ({"X_Request_Timeout_Ms": "2500"}, 102.5, 102.5),
        ({"X_Request_Timeout_Ms": "999000"}, 280.0, 1099.0),
        ({"X_NPU_Start_Timeout_Ms": "2500", "X_Request_Timeout_Ms": "999000"}, 102.5, 1099.0),
        ({"X_NPU_Start_Timeout_Ms": "9500", "X_Request_Timeout_Ms": "2500"}, 102.5, 102.5),
    ],
)
def test_a_stream_ends_when_the_caller_says_and_at_no_default(headers, deadline, ends):
    found = context(**headers)
    assert (found.deadline, found.ends) == (deadline, ends)


@pytest.mark.parametrize(
    ("headers", "error"),
    [
        ({"X_Priority": "urgent"}, BadRequest),
        ({"X_NPU_Require_Device": "TPU"}, BadRequest),
        ({"X_NPU_Engine_Deaths": "one"}, BadRequest),
        ({"X_Request_Timeout_Ms": "soon"}, BadRequest),
        ({"X_Request_Timeout_Ms": "0"}, DeadlineExceeded),
        ({"X_NPU_Start_Timeout_Ms": "soon"}, BadRequest),
        ({"X_NPU_Start_Timeout_Ms": "0"}, DeadlineExceeded),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(headers, error):
    with pytest.raises(error) as refused:
        context(**headers)
    assert refused.value.param == next(iter(headers)).replace("_", "-")


def end(busy_us=None, *, shared=False):
    return Finished(FinishReason.STOP, Usage(3, 2), Timing(0.0, 0.1, 5.0, 6.0, 2.0), Busy(busy_us, shared))


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
    assert busy_fields(busy_of([part.busy for part in ends])) == fields
