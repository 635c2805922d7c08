"""What admission control is told of each engine, and how far its memory may grow."""

import pytest

from worker_node.devices.memory import machine_memory
from worker_node.engines.restart import default_growth
from worker_node.serving.build import EnginePlan, admission_limits, growth_limits
from worker_node.tasks.embed.options import EmbeddingOptions, StaticOptions
from worker_node.tasks.generate.options import ContinuousOptions, StatefulOptions


def limits_of(options, max_outstanding=None):
    return admission_limits(EnginePlan(options, 256, 256), max_outstanding)


def test_texts_are_counted_as_the_npu_pads_them():
    limits = limits_of(StaticOptions(npu_buckets=(32, 64, 256), npu_batch_size=4))
    assert [limits.computed_tokens(count) for count in (1, 32, 33, 256)] == [32, 32, 64, 256]
    assert limits.capacity.step_tokens == 4 * 256
    assert limits_of(EmbeddingOptions()).computed_tokens(33) == 33
    packed = limits_of(StaticOptions(npu_buckets=(32, 64, 256), npu_packing=True))
    assert [packed.computed_tokens(count) for count in (1, 33, 256)] == [1, 33, 256]


@pytest.mark.parametrize(
    ("options", "sequences", "step"),
    [({}, 256, 256), ({"max_num_seqs": 8, "max_num_batched_tokens": 512}, 8, 512)],
    ids=["defaults", "as set"],
)
def test_the_continuous_engine_runs_as_many_sequences_as_its_settings_say(options, sequences, step):
    limits = limits_of(ContinuousOptions(**options))
    assert (limits.capacity.sequences, limits.capacity.step_tokens) == (sequences, step)


def test_the_npu_runs_one_generation_at_a_time():
    limits = limits_of(StatefulOptions())
    assert (limits.capacity.sequences, limits.parallel) == (1, 1)


@pytest.mark.parametrize("engine", [EmbeddingOptions, ContinuousOptions, StatefulOptions])
def test_the_setting_bounds_what_is_outstanding(engine):
    assert limits_of(engine(), max_outstanding=7).max_outstanding == 7
    assert limits_of(engine()).max_outstanding > 7


def test_the_growth_of_a_process_is_the_setting_or_a_share_of_the_machines_memory():
    assert growth_limits(None).growth == default_growth(machine_memory().total)
    assert growth_limits(1234).growth == 1234
