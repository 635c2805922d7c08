"""SmolLM2 without most of its layers: it loads and answers with a sixth of the CPU time, and says nothing sensible.

Tokenizer, chat template, weights, KV cache and both engines are those of the whole model. It suits tests of what
surrounds an answer: processes, streams, limits, proofs of the device.
"""

import hashlib
import json
import shutil
from pathlib import Path

import openvino as ov

from tests.support.foreign import kept
from worker_node.models.manifest import MANIFEST_FILE, MODEL_FILE, WEIGHTS_FILE
from worker_node.models.store import ModelStore

LAYERS = 2
WRITER = "smollm2-135m-instruct"
EMBEDDER = "all-minilm-l6-v2"
# No word is expected of the answer: the engine must generate, and the device's busy counter must move.
CANARY = {"prompt": "What is the capital of France?", "expected": [], "max_new_tokens": 2}


def quick_store(store: ModelStore) -> Path:
    """The root of a store with the embedding model of `store` and its cut generation model, under their usual ids."""
    whole = store.get(WRITER).path
    content = (whole / MANIFEST_FILE).read_bytes() + Path(__file__).read_bytes()

    def make(root: Path) -> None:
        (root / EMBEDDER).symlink_to(store.get(EMBEDDER).path)
        shutil.copytree(whole, root / WRITER, ignore=lambda _directory, _names: (MODEL_FILE, WEIGHTS_FILE))
        cut(whole / MODEL_FILE, root / WRITER / MODEL_FILE)
        manifest = json.loads((whole / MANIFEST_FILE).read_bytes())
        for name in manifest["files"]:
            manifest["files"][name] = (root / WRITER / name).stat().st_size
        (root / WRITER / MANIFEST_FILE).write_text(json.dumps(manifest | {"canary": CANARY}), encoding="utf-8")

    return kept(f"quick-store-{hashlib.sha256(content).hexdigest()[:16]}", make)


def cut(source: Path, target: Path, layers_kept: int = LAYERS) -> None:
    """Let the last norm take what layer `layers_kept` gives, and leave out what nothing needs any more."""
    model = ov.Core().read_model(source)
    layers = {}
    for node in model.get_ops():
        if node.get_friendly_name().startswith("model.layers.self_attn.add1.layer"):
            layers[int(node.get_friendly_name().rpartition("layer")[2])] = node
    last, kept_last = layers[max(layers)], layers[layers_kept - 1]
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
    sinks = [sink for sink in model.get_sinks() if sink.get_variable_id() in variables]
    ov.save_model(ov.Model(model.get_results(), sinks, model.get_parameters()), target, compress_to_fp16=False)
