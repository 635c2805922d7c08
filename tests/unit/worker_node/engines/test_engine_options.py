"""The options that an engine process gets."""

import pytest

from worker_node.core.types import Device
from worker_node.encoders.jobs import StaticEncoderOptions
from worker_node.engines.options import options_in
from worker_node.engines.protocol import EngineSpec


def spec(**options):
    return EngineSpec("m", "embedding", "/m", Device.NPU, "a.module:Runner", options)


def test_an_option_that_the_engine_does_not_declare_is_an_error():
    with pytest.raises(TypeError, match=r"StaticEncoderOptions must declare turbo, which a.module:Runner is given"):
        options_in(spec(engine="embedding_static", npu_batch_size=2, turbo=True), StaticEncoderOptions)
    assert options_in(spec(engine="embedding_static", npu_batch_size=2), StaticEncoderOptions).npu_batch_size == 2
