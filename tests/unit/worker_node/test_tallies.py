"""Tallies and distributions look in /metrics as prometheus_client's own counters and histograms do."""

import random

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest

from worker_node.core.types import Device
from worker_node.observability.metrics import Distribution, Tally

LABELS = ("model", "device")
BOUNDS = (0.001, 0.5, 1, 30)


def exposed(registry):
    """What /metrics has of a registry; the order of the series means nothing."""
    return sorted(generate_latest(registry).decode().splitlines())


@pytest.mark.parametrize("amounts", [[], [0], [1, 2.5, 0.25], [7] * 30])
def test_a_tally_is_exposed_as_a_counter(amounts):
    disable_created_metrics()
    ours, theirs = CollectorRegistry(auto_describe=True), CollectorRegistry(auto_describe=True)
    tally = Tally("npu_node_texts", "Texts", LABELS, ours)
    counter = Counter("npu_node_texts", "Texts", LABELS, registry=theirs)
    for number, amount in enumerate(amounts):
        model = f"m{number % 3}"
        tally.add(amount, model, Device.CPU)
        counter.labels(model, "CPU").inc(amount)
    assert exposed(ours) == exposed(theirs)


def test_a_distribution_is_exposed_as_a_histogram():
    disable_created_metrics()
    ours, theirs = CollectorRegistry(auto_describe=True), CollectorRegistry(auto_describe=True)
    distribution = Distribution("npu_node_time_seconds", "Time", LABELS, BOUNDS, ours)
    histogram = Histogram("npu_node_time_seconds", "Time", LABELS, buckets=BOUNDS, registry=theirs)
    rng = random.Random(1)
    for value in (*BOUNDS, 0.0, 31.0, *(rng.lognormvariate(0, 3) for _ in range(200))):
        model = rng.choice(("a", "b"))
        distribution.observe(value, model, Device.NPU)
        histogram.labels(model, "NPU").observe(value)
    assert exposed(ours) == exposed(theirs)


def test_a_name_is_taken_once():
    registry = CollectorRegistry(auto_describe=True)
    Tally("npu_node_texts", "Texts", LABELS, registry)
    with pytest.raises(ValueError, match="Duplicated"):
        Tally("npu_node_texts", "Texts", LABELS, registry)
