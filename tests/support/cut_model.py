"""SmolLM2 without most of its layers: it loads and answers with a sixth of the CPU time, and says nothing sensible.

Tokenizer, chat template, weights, KV cache and both engines are those of the whole model. It suits tests of what
surrounds an answer: processes, streams, limits, forms, proofs of the device.

Two layers write blanks and never end. So blanks are made unlikely; and by position, the same on every engine and in
every batch, each fourth token closes a text, an object or a list or goes on in it, and each 64th ends the answer.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai as genai
from openvino import opset13 as op

from tests.support.foreign import kept
from worker_node.models.directory import MANIFEST_FILE, MODEL_FILE, WEIGHTS_FILE
from worker_node.models.store import ModelStore

LAYERS = 2
# By the front end's name, and by GenAI's in stores that were filled before OpenVINO's front end made the graph.
_LAYER_OUTPUT = re.compile(r"(?:_blk\.|self_attn\.add1\.layer)(\d+)(?:\.l_out)?$")
WRITER = "smollm2-135m-instruct"
EMBEDDER = "all-minilm-l6-v2"
CLOSING = ('"', "}", "]", ":", ",", "{", "[", "1", "true")
CLOSES_EACH, ENDS_EACH = 4, 64  # tokens
RAISED, LOWERED = 300, 10  # by how much a logit is raised or lowered
# No word is expected of the answer: the engine must generate, and the device's busy counter must move.
CANARY = {"prompt": "What is the capital of France?", "expected": [], "max_new_tokens": 2}


def quick_store(store: ModelStore) -> Path:
    """The root of a store with the embedding model of `store` and its cut generation model, under their usual ids."""
    whole = store.get(WRITER).path
    content = (whole / MANIFEST_FILE).read_bytes() + Path(__file__).read_bytes()

    def make(root: Path) -> None:
        (root / EMBEDDER).symlink_to(store.get(EMBEDDER).path)
        shutil.copytree(whole, root / WRITER, ignore=lambda _directory, _names: (MODEL_FILE, WEIGHTS_FILE))
        cut(whole / MODEL_FILE, root / WRITER / MODEL_FILE, _end_answers)
        manifest = json.loads((whole / MANIFEST_FILE).read_bytes())
        for file in manifest["files"]:
            manifest["files"][file] = (root / WRITER / file).stat().st_size
        (root / WRITER / MANIFEST_FILE).write_text(json.dumps(manifest | {"canary": CANARY}), encoding="utf-8")

    return kept(f"quick-store-{hashlib.sha256(content).hexdigest()[:16]}", make)


def cut(source: Path, target: Path, change: Callable[[ov.Model, Path], None]) -> None:
    """Let the last norm take what the second layer gives, `change` it, leave out what nothing needs any more."""
    model = ov.Core().read_model(source)
    found = ((_LAYER_OUTPUT.search(node.get_friendly_name()), node) for node in model.get_ops())
    layers = {int(name[1]): node for name, node in found if name}
    last, kept_last = layers[max(layers)], layers[LAYERS - 1]
    for taker in last.output(0).get_target_inputs():
        taker.replace_source_output(kept_last.output(0))
    needed, pending = set(), list(model.get_results())
    while pending:
        node = pending.pop()
        if node.get_friendly_name() not in needed:
            needed.add(node.get_friendly_name())
            pending += [taken.get_source_output().get_node() for taken in node.inputs()]
    variables = {
        node.get_variable_id()
        for node in model.get_ops()
        if node.get_type_name() == "ReadValue" and node.get_friendly_name() in needed
    }
    change(model, source.parent)
    sinks = [sink for sink in model.get_sinks() if sink.get_variable_id() in variables]
    ov.save_model(ov.Model(model.get_results(), sinks, model.get_parameters()), target, compress_to_fp16=False)


def _end_answers(model: ov.Model, directory: Path) -> None:
    """Add to what the last multiplication takes, at the positions where something is to end."""
    (logits,) = (result.input_value(0).get_node() for result in model.get_results())
    tokenizer = genai.Tokenizer(directory)
    closing = [_token(tokenizer, text) for text in CLOSING]
    weights = ov.compile_model(ov.Model([logits.input_value(1)], [], "weights"), "CPU")(())[0]
    blanks = weights[[number for token, number in tokenizer.get_vocab().items() if not token.strip()]]
    direction = blanks.mean(axis=0) - weights.mean(axis=0)
    direction *= LOWERED / (blanks @ direction).mean()
    close = _preferring(weights, closing)
    end = _preferring(weights, [tokenizer.get_eos_token_id(), *closing])
    positions, tokens = (
        next(port for port in model.inputs if name in port.names) for name in ("position_ids", "input_ids")
    )

    def each(count: int) -> ov.Node:
        return op.equal(op.floor_mod(positions, np.int64(count)), np.int64(count - 1))

    def where(condition: ov.Node, vector: np.ndarray) -> ov.Node:
        return op.multiply(op.unsqueeze(op.convert(condition, "f32"), np.int64(2)), vector[None, None])

    # Not after a line's end: with one the chat's prompt ends, and an answer is to have at least one token.
    ends = op.logical_and(each(ENDS_EACH), op.not_equal(tokens, np.int64(_token(tokenizer, "\n"))))
    added = op.add(where(each(CLOSES_EACH), close), where(ends, end - close))
    hidden = op.subtract(logits.input_value(0), direction.astype(np.float32)[None, None])
    logits.input(0).replace_source_output(op.add(hidden, added).output(0))


def _token(tokenizer: genai.Tokenizer, text: str) -> int:
    return int(tokenizer.encode(text, add_special_tokens=False).input_ids.data[0, -1])


def _preferring(weights: np.ndarray, tokens: list[int]) -> np.ndarray:
    """What makes the first of these tokens far likelier than the second, and so on, and each than all others."""
    wanted, counts = np.zeros(len(weights)), np.ones(len(weights))
    wanted[tokens], counts[tokens] = np.linspace(2, 1, len(tokens)), 1e4
    weighted = weights * counts[:, None]
    vector = np.linalg.solve(weights.T @ weighted, weighted.T @ wanted)
    given = weights @ vector
    margin = -np.diff([*given[tokens], np.delete(given, tokens).max()]).min()
    assert margin > 0, "these tokens are too much alike"
    return (RAISED / margin * vector).astype(np.float32)
