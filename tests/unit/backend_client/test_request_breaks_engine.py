"""A request that takes engines down is refused by its node; the client must not carry it to the next one."""

from backend_client.errors import RequestRejected
from backend_client.http.errors import event_error

ERROR = {"error": {"code": "request_breaks_engine", "message": "m on NPU: it takes down the engine", "type": "x"}}


def test_it_is_a_rejection_in_a_stream_too_where_there_is_no_status():
    error = event_error("http://a", ERROR, None)
    assert type(error) is RequestRejected
    assert (error.status, error.code) == (400, "request_breaks_engine")
