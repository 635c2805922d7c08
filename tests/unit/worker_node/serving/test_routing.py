"""Every route and every refusal, over scripted placements."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_node.core.errors import (
    ContextLengthExceeded,
    DeviceUnavailable,
    EngineUnavailable,
    ModelLoading,
    NodeError,
    UnsupportedParameter,
)
from worker_node.core.types import Device
from worker_node.serving.routing import Demand, PlacementStatus, choose

NPU = PlacementStatus(Device.NPU, prompt_limit=1024, total_limit=1152)
GPU = PlacementStatus(Device.GPU, prompt_limit=4096, total_limit=4096)
CPU = PlacementStatus(Device.CPU, prompt_limit=8192, total_limit=8192)


def blocked(device, obstacle, **more):
    return PlacementStatus(device, 1024, 1152, obstacle=obstacle, **more)


def route(*statuses, prompt_tokens=10, min_new_tokens=1, needs=frozenset(), require=None):
    """The index and the reason of the route. Raises the refusal."""
    decision = choose(Demand("m", (), prompt_tokens, prompt_tokens, min_new_tokens, require, needs), statuses)
    if decision.error is not None:
        raise decision.error
    return decision.index, decision.reason


def test_the_first_placement_is_preferred():
    assert route(NPU, CPU) == (0, "preferred")


@pytest.mark.parametrize(("prompt", "new"), [(1025, 1), (1024, 129), (1, 1152)])
def test_what_the_npu_cannot_hold_goes_on(prompt, new):
    assert route(NPU, CPU, prompt_tokens=prompt, min_new_tokens=new) == (1, "context_exceeds_npu")


def test_limits_are_inclusive():
    assert route(NPU, CPU, prompt_tokens=1024, min_new_tokens=128)[0] == 0


@pytest.mark.parametrize("obstacle", ["device_unavailable", "device_quarantined", "model_loading"])
def test_a_placement_that_cannot_serve_is_passed_over_with_its_reason(obstacle):
    assert route(blocked(Device.NPU, obstacle), CPU) == (1, obstacle)


def test_a_required_device_is_never_replaced():
    assert route(NPU, CPU, require=Device.CPU) == (1, "device_required")
    with pytest.raises(DeviceUnavailable, match="requires NPU"):
        route(blocked(Device.NPU, "device_quarantined", detail="canary failed"), CPU, require=Device.NPU)
    with pytest.raises(DeviceUnavailable, match="no placement on GPU"):
        route(NPU, CPU, require=Device.GPU)
    with pytest.raises(ContextLengthExceeded, match="1025 tokens"):
        route(NPU, CPU, prompt_tokens=1025, require=Device.NPU)


def test_too_long_for_all_is_refused_with_the_numbers():
    with pytest.raises(ContextLengthExceeded) as caught:
        route(NPU, CPU, prompt_tokens=9000, min_new_tokens=5)
    assert "9000 tokens" in caught.value.message
    assert "8192" in caught.value.message


def test_nothing_up_says_when_to_try_again():
    with pytest.raises(EngineUnavailable) as caught:
        route(blocked(Device.CPU, "device_unavailable", retry_after=2.5, detail="died"))
    assert caught.value.retry_after == 2.5
    with pytest.raises(ModelLoading):
        route(blocked(Device.CPU, "model_loading"))


def test_of_those_that_cannot_serve_the_one_that_is_being_loaded_is_waited_for():
    with pytest.raises(ModelLoading) as caught:
        route(blocked(Device.NPU, "device_quarantined"), blocked(Device.CPU, "model_loading", retry_after=3.0))
    assert caught.value.retry_after == 3.0


@pytest.mark.parametrize("feature", ["n", "logprobs"])
def test_what_a_placement_cannot_do_goes_to_the_next_that_can(feature):
    npu = replace(NPU, lacks=frozenset({"n", "logprobs"}))
    assert route(npu, CPU, needs=frozenset({feature})) == (1, "unsupported_on_npu")
    assert route(npu, CPU) == (0, "preferred")
    with pytest.raises(UnsupportedParameter) as caught:
        route(npu, CPU, needs=frozenset({feature}), require=Device.NPU)
    assert caught.value.param == feature
    with pytest.raises(ContextLengthExceeded, match="8192"):
        route(npu, CPU, needs=frozenset({feature}), prompt_tokens=9000)
    with pytest.raises(UnsupportedParameter):
        route(npu, needs=frozenset({feature}))


def test_the_reason_names_the_device_that_was_skipped_first():
    gpu = replace(GPU, lacks=frozenset({"n"}))
    assert route(gpu, CPU, prompt_tokens=5000) == (1, "context_exceeds_gpu")
    assert route(gpu, CPU, needs=frozenset({"n"})) == (1, "unsupported_on_gpu")
    assert route(NPU, gpu, CPU, prompt_tokens=5000) == (2, "context_exceeds_npu")
    assert route(replace(CPU, prompt_limit=10), GPU, prompt_tokens=11) == (1, "context_exceeds_cpu")


features = st.frozensets(st.sampled_from(["n", "logprobs"]))
statuses = st.builds(
    PlacementStatus,
    st.sampled_from(Device),
    st.integers(1, 100),
    st.integers(1, 100),
    obstacle=st.sampled_from([None, "device_unavailable", "device_quarantined", "model_loading"]),
    lacks=features,
)


@given(
    st.lists(statuses, min_size=1, max_size=4),
    st.integers(0, 120),
    st.integers(0, 120),
    features,
    st.none() | st.sampled_from(Device),
)
def test_the_route_is_the_first_that_can_or_a_typed_refusal(placements, prompt, new, needs, require):
    able = [
        i
        for i, c in enumerate(placements)
        if c.obstacle is None
        and prompt <= c.prompt_limit
        and prompt + new <= c.total_limit
        and not needs & c.lacks
        and require in {None, c.device}
    ]
    try:
        index, _ = route(*placements, prompt_tokens=prompt, min_new_tokens=new, needs=needs, require=require)
    except NodeError:
        assert not able
    else:
        assert index == able[0]
