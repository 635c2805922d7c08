"""A model of one constant that writes whatever a grammar lets it, at random: what a grammar admits, seen by sampling.

It runs in GenAI's own pipeline with a real tokenizer, so the grammar is read by the runtime that the engines use. Of
its vocabulary the first tokens are left, bytes and the most frequent pieces of several characters: compiling a grammar
and sampling a token take time in proportion to the number of tokens.
"""

import functools
import json

import numpy as np
import openvino as ov
import openvino_genai as genai
import openvino_tokenizers  # noqa: F401  its operations are known to OpenVINO from here on
from openvino import opset13 as ops

LONGEST = 120
TOKENS = 2000


class HeldText:
    """Samples texts that a grammar admits; `None` for one that did not end in time."""

    def __init__(self, tokenizer_directory, scratch):
        _save_cut_detokenizer(tokenizer_directory, scratch)
        self._tokenizer = genai.Tokenizer(str(scratch))
        vocabulary = self._tokenizer.get_vocab()
        # Short tokens and closing signs are likely, so that texts end.
        weights = np.full(max(vocabulary.values()) + 1, -30, np.float32)
        for piece, token in vocabulary.items():
            weights[token] = -3.0 * len(piece)
        for sign in (b'"', b"}", b"]"):
            weights[vocabulary[sign]] = 2
        self._end = json.loads((tokenizer_directory / "generation_config.json").read_text())["eos_token_id"]
        weights[self._end] = 3
        ov.save_model(_constant_model(weights), scratch / "model.xml", compress_to_fp16=False)
        self._pipeline = genai.LLMPipeline(
            (scratch / "model.xml").read_text(),
            ov.Tensor(np.fromfile(scratch / "model.bin", np.uint8)),
            self._tokenizer,
            "CPU",
            genai.GenerationConfig(),
            ATTENTION_BACKEND="SDPA",
        )

    def sample(self, grammar, seed):
        tokens = self._generate(grammar, seed, LONGEST)
        return self._tokenizer.decode(tokens[:-1]) if tokens[-1] == self._end else None

    def run(self, grammar, seed, most):
        return len(self._generate(grammar, seed, most))

    def _generate(self, grammar, seed, most):
        config = genai.GenerationConfig()
        config.eos_token_id = self._end
        config.max_new_tokens = most
        config.do_sample = True
        config.rng_seed = seed
        config.structured_output_config = genai.StructuredOutputConfig(grammar=grammar)
        one = ov.Tensor(np.array([[1]], np.int64))
        return self._pipeline.generate(genai.TokenizedInputs(one, one), config).tokens[0]


@functools.cache
def _core():
    """Kept: the library of its extension must not be unloaded while a model uses it."""
    return ov.Core()


def _save_cut_detokenizer(source, target):
    """Write the detokenizer with its first `TOKENS` tokens."""
    model = _core().read_model(source / "openvino_detokenizer.xml")
    (decoder,) = (node for node in model.get_ops() if node.get_type_name() == "VocabDecoder")
    begins, ends, characters = (np.array(decoder.input_value(index).get_node().data) for index in (1, 2, 3))
    cut = begins[:TOKENS], ends[:TOKENS], characters[: ends[TOKENS - 1]]
    for index, values in enumerate(cut, start=1):
        decoder.input(index).replace_source_output(ops.constant(values).output(0))
    ov.save_model(model, target / "openvino_detokenizer.xml")


def _constant_model(weights):
    ids, mask = (_input(name, [-1, -1], np.int64) for name in ("input_ids", "attention_mask"))
    beams = _input("beam_idx", [-1], np.int32)
    nothing = ops.constant(np.float32(0))

    def silenced(value, axes):
        total = ops.reduce_sum(ops.convert(value, "f32"), ops.constant(axes, dtype=np.int64))
        return ops.multiply(total, nothing)

    rows = ops.multiply(ops.convert(ops.unsqueeze(ids, ops.constant(2, dtype=np.int64)), "f32"), nothing)
    rows = ops.add(ops.add(rows, silenced(mask, [0, 1])), silenced(beams, [0]))
    logits = ops.add(rows, ops.constant(weights.reshape(1, 1, -1)))
    logits.output(0).get_tensor().set_names({"logits"})
    return ov.Model([ops.result(logits)], [ids, mask, beams], "constant")


def _input(name, shape, dtype):
    parameter = ops.parameter(shape, dtype, name=name)
    parameter.output(0).get_tensor().set_names({name})
    return parameter
