"""A vision-language model of the LLaVA form that reads colours, made from two layers of SmolLM2 by splitting its graph.

It has real language weights and no vision: the "vision" graph maps the mean colour of each quarter of an image to the
embedding of the nearest of three colour words. So an image is to the language model what `words` are, and gets the
same answer. It proves the wiring (images reach the language model, in order, as tokens), not that a model sees. Its
one unused token, `<reponame>`, becomes `<image>`.
"""

import hashlib
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_tokenizers
from openvino import opset13 as op

from tests.support import cut_model
from tests.support.cut_model import cut
from tests.support.foreign import kept
from worker_node.models.directory import MANIFEST_FILE, MODEL_FILE

# Words that are one token with a blank before them.
COLOURS = {" red": (255, 0, 0), " green": (0, 255, 0), " blue": (0, 0, 255)}
FLATNESS = 0.2  # of the logits; at a temperature of 2 the likeliest word is still one of many
_OLD, _NEW = b"<reponame>", b"<image>"
_SIDE = 28


def words(colour):
    """The text that is to the language model what an image of this colour is."""
    return f" {colour}" * 4 + "\n"  # its quarters, and the line's end that GenAI adds


def kept_colours(store):
    """The directory of the model, beside the one for what is compiled: both are kept between runs of the suite."""
    whole = store.get("smollm2-135m-instruct").path
    sources = (whole / MANIFEST_FILE, Path(__file__), Path(cut_model.__file__))
    content = b"".join(path.read_bytes() for path in sources)
    name = f"colours-{hashlib.sha256(content).hexdigest()[:16]}"
    return kept(name, lambda root: build(whole, root / "colours")) / "colours"


def build(source, target):
    target.mkdir(parents=True)
    core = ov.Core()
    core.add_extension(str(_extension()))
    tokenizer = core.read_model(source / "openvino_tokenizer.xml")
    compiled = core.compile_model(tokenizer, "CPU")
    tokens = [int(compiled([text])[0][0, -1]) for text in COLOURS]
    with tempfile.TemporaryDirectory() as temporary:
        cut(source / MODEL_FILE, Path(temporary) / MODEL_FILE, _flatten)
        embedding = _split(core.read_model(Path(temporary) / MODEL_FILE), target)
    exact = {"INFERENCE_PRECISION_HINT": "f32"}
    table = core.compile_model(core.read_model(target / "openvino_text_embeddings_model.xml"), "CPU", exact)
    vectors = np.stack([table(np.array([[token]]))[0][0, 0] for token in tokens])
    ov.save_model(_vision(vectors), target / "openvino_vision_embeddings_model.xml", compress_to_fp16=False)
    for name in ("openvino_tokenizer", "openvino_detokenizer"):
        graph = core.read_model(source / f"{name}.xml")
        _rename_token(graph)
        ov.save_model(graph, target / f"{name}.xml")
    _write_configuration(source, target, embedding)
    return target


def _flatten(model, _directory):
    """Make all words about as likely: what is sampled then depends on each number that reaches the model."""
    (logits,) = (result.input_value(0).get_node() for result in model.get_results())
    hidden = logits.input_value(0)
    logits.input(0).replace_source_output(op.multiply(hidden, op.constant(np.float32(FLATNESS))).output(0))


def _extension():
    library = Path(openvino_tokenizers.__file__).parent / "lib"
    return next(library.glob("libopenvino_tokenizers*"))


def _split(model, target):
    """Save the embedding table as one graph and what follows it as another; returns the embedding's width."""
    ids = next(port for port in model.inputs if "input_ids" in port.names)
    gather = next(
        node
        for node in model.get_ordered_ops()
        if node.get_type_name() == "Gather" and node.output(0).get_partial_shape().rank.get_length() == 3
    )
    width = gather.output(0).get_partial_shape()[2].get_length()
    embeds = op.parameter([-1, -1, width], np.float32, name="inputs_embeds")
    embeds.output(0).set_names({"inputs_embeds"})
    table = ov.Model([op.result(gather.output(0))], [ids.get_node()], "text_embeddings")
    table.output(0).set_names({"inputs_embeds"})
    ov.save_model(table, target / "openvino_text_embeddings_model.xml", compress_to_fp16=False)
    gather.output(0).replace(embeds.output(0))
    for reader in ids.get_target_inputs():
        if reader.get_node().get_type_name() == "ShapeOf":
            reader.replace_source_output(embeds.output(0))
    others = [port.get_node() for port in model.inputs if "input_ids" not in port.names]
    language = ov.Model(model.get_results(), model.get_sinks(), [embeds, *others], "language_model")
    ov.save_model(language, target / "openvino_language_model.xml", compress_to_fp16=False)
    return width


def _vision(vectors):
    """From pixel values [1, 3, side, side] in 0..1 to four vectors [1, 4, width], one for each quarter."""
    pixels = op.parameter([-1, 3, -1, -1], np.float32, name="pixel_values")
    pixels.output(0).set_names({"pixel_values"})
    quarters = op.adaptive_avg_pool(pixels, op.constant(np.array([2, 2], np.int64)))
    flat = op.reshape(quarters, op.constant(np.array([0, 3, 4], np.int64)), special_zero=True)
    colours = op.transpose(flat, op.constant(np.array([0, 2, 1], np.int64)))
    palette = np.array(list(COLOURS.values()), np.float32) / 255
    # The nearest colour has the largest product with what is centred: all have the same length.
    nearness = op.matmul(colours, op.constant(palette), False, True)
    chosen = op.topk(nearness, op.constant(np.int64(1)), -1, "max", "value", index_element_type="i64")
    rows = op.squeeze(chosen.output(1), op.constant(np.array([2], np.int64)))
    found = op.gather(op.constant(vectors.astype(np.float32)), rows, op.constant(np.int64(0)))
    found.output(0).set_names({"last_hidden_state"})
    return ov.Model([op.result(found)], [pixels], "vision_embeddings")


def _rename_token(graph):
    """Replace the text of the unused token: in the table of tokens, in the added ones and in the pattern."""
    nodes = {node.get_friendly_name(): node for node in graph.get_ordered_ops()}
    for node in nodes.values():
        if node.get_type_name() != "Constant" or node.get_element_type() != ov.Type.u8:
            continue
        content = node.get_data().tobytes()
        pattern, short = rb"\<reponame\>", rb"\<image\>"
        if pattern in content:
            # As long as before: one of {1} fills up.
            assert content.count(pattern) == 1
            new = (
                content.replace(b"(" + pattern + b")", b"(" + short + b"){1}")
                if b"(" + pattern + b")" in content
                else (content.replace(pattern, short + b"{1}"))
            )
            assert len(new) == len(content), (content, new)
            _replace(node, np.frombuffer(new, np.uint8))
        elif content.count(_OLD) == 1:
            place, ends = content.index(_OLD), _ends_beside(node)
            _replace(node, np.frombuffer(content.replace(_OLD, _NEW + b"\0\0\0"), np.uint8))
            data = ends.get_data().copy()
            row = int(np.flatnonzero(data == place + len(_OLD))[0])
            data[row] -= len(_OLD) - len(_NEW)
            _replace(ends, data)


def _ends_beside(node):
    """The constant with the ends of the strings that `node` holds: the input before it of whatever reads both."""
    reader = next(iter(node.output(0).get_target_inputs()))
    return reader.get_node().input_value(reader.get_index() - 1).get_node()


def _replace(node, data):
    new = op.constant(data.reshape(list(node.output(0).get_shape())), dtype=node.get_element_type())
    node.output(0).replace(new.output(0))


def _write_configuration(source, target, width):
    config = json.loads((source / "config.json").read_text())
    config |= {"model_type": "llava", "hidden_size": width, "vision_config": {"patch_size": _SIDE // 2}}
    (target / "config.json").write_text(json.dumps(config))
    (target / "preprocessor_config.json").write_text(
        json.dumps(
            {
                "crop_size": {"height": _SIDE, "width": _SIDE},
                "size": {"shortest_edge": _SIDE},
                "image_mean": [0.0, 0.0, 0.0],
                "image_std": [1.0, 1.0, 1.0],
            }
        )
    )
    for name in ("generation_config.json", "chat_template.jinja"):
        shutil.copyfile(source / name, target / name)
