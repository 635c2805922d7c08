"""A configured model that is not in the store: the message has the command that puts it into that store."""

import re
import shlex

import pytest

from worker_node.cli.main import build_parser
from worker_node.core.errors import ConfigurationError
from worker_node.models.store import ModelStore
from worker_node.serving.build import installed_model
from worker_node.settings import ModelSettings, NodeSettings


def test_the_command_that_is_named_pulls_the_model_into_the_store_of_the_node(tmp_path):
    store = tmp_path / "a store"
    settings = NodeSettings(model_store=store)
    with pytest.raises(ConfigurationError) as raised:
        installed_model(ModelSettings(name="all-minilm-l6-v2"), ModelStore(store), settings)
    program, *arguments = shlex.split(re.search(r"run: (.*)", raised.value.message)[1])
    assert program == "npu-node"
    assert vars(build_parser().parse_args(arguments))["model_store"] == store
