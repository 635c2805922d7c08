"""`generation_config.json`: what counts of it, and what is refused."""

import json
import re

import pytest

from worker_node.core.errors import ConfigurationError
from worker_node.models.directory import sampling_defaults


@pytest.fixture
def read(tmp_path):
    def read_it(**config):
        (tmp_path / "generation_config.json").write_text(json.dumps(config))
        return sampling_defaults(tmp_path)

    return read_it


def test_a_model_that_samples_is_read_whole(read, tmp_path):
    assert sampling_defaults(tmp_path) == {}, "it has no such file"
    config = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05, "min_p": 0}
    expected = {name: value for name, value in config.items() if name != "do_sample"}
    assert read(**config, max_new_tokens=2048, eos_token_id=[1, 2]) == expected | {"max_new_tokens": 2048}


def test_without_do_sample_it_is_greedy_and_with_it_the_temperature_is_1(read):
    assert read(temperature=0.7, top_p=0.9) == {"temperature": 0.0, "top_p": 0.9}
    assert read(do_sample=False)["temperature"] == 0
    assert read(do_sample=True) == {"temperature": 1.0}
    assert read(do_sample=True, temperature=0.7, top_p=0) == {"temperature": 0.0, "top_p": 1.0}


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": "hot"}, {"top_p": 2}, {"top_k": 1.5}, {"top_k": True}, {"temperature": -1}, {"max_new_tokens": 0}],
)
def test_a_value_that_makes_no_sense_is_told_with_its_file_and_key(read, tmp_path, wrong):
    file = re.escape(str(tmp_path / "generation_config.json"))
    with pytest.raises(ConfigurationError, match=rf"{file}: Expected .*\$\.{next(iter(wrong))}"):
        read(**wrong)
