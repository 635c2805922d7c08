"""The memory of a static KV cache."""

import json

import pytest

from worker_node.tasks.generate.building import kv_cache_bytes

SMOLLM = {"num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}


def write(directory, **changes):
    (directory / "config.json").write_text(json.dumps(SMOLLM | changes))
    return directory


def test_keys_and_values_of_every_layer_in_two_bytes(tmp_path):
    assert kv_cache_bytes(write(tmp_path), 1152) == 2 * 30 * 3 * 64 * 2 * 1152
    assert kv_cache_bytes(write(tmp_path, num_key_value_heads=None), 1) == 2 * 30 * 9 * 64 * 2
    assert kv_cache_bytes(write(tmp_path, head_dim=128), 1) == 2 * 30 * 3 * 128 * 2


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"num_attention_heads": 0, "hidden_size": 1}'])
def test_what_is_not_told_is_not_guessed(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    assert kv_cache_bytes(tmp_path, 1) is None
    assert kv_cache_bytes(tmp_path / "missing", 1) is None
