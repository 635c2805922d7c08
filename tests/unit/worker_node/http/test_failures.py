"""The ring of recent failures: bounded, merged by sort, latest first."""

import dataclasses
import itertools

from worker_node.core.errors import EngineUnavailable, ModelNotFound
from worker_node.observability.failures import RecentFailures


def died(model="m", device="NPU"):
    error = EngineUnavailable("the text of the error is not kept")
    error.model, error.device = model, device
    return error


def test_equal_failures_are_one_entry_that_moves_to_the_front():
    failures = RecentFailures(clock=itertools.count(100).__next__)
    failures.add(died(), "/inference")
    failures.add(ModelNotFound("no such model"), "/v1/embeddings")
    failures.add(died(), "/inference")
    first, second = failures.latest_first()
    assert (first.code, first.status, first.route, first.model, first.device) == (
        "engine_unavailable",
        503,
        "/inference",
        "m",
        "NPU",
    )
    assert (first.count, first.first, first.last) == (2, 100, 102)
    assert (second.code, second.model, second.device, second.count) == ("model_not_found", None, None, 1)


def test_a_caller_who_repeats_a_mistake_hides_no_other_failure():
    failures = RecentFailures()
    failures.add(died(), "/inference")
    for _ in range(1000):
        failures.add(ModelNotFound("no such model"), "/v1/embeddings")
    assert [entry.count for entry in failures.latest_first()] == [1000, 1]


def test_only_the_latest_failures_are_kept():
    failures = RecentFailures(kept=3)
    for number in range(10):
        failures.add(died(model=f"m{number}"), "/inference")
    assert [entry.model for entry in failures.latest_first()] == ["m9", "m8", "m7"]


def test_no_message_is_kept():
    failures = RecentFailures()
    failures.add(died(), "/inference")
    (entry,) = failures.latest_first()
    assert "text of the error" not in str(dataclasses.asdict(entry))
