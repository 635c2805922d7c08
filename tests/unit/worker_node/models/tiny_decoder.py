"""A tiny decoder that embeds by its last token, with random weights, as optimum exports Qwen3-Embedding."""

import numpy as np
import openvino as ov
from openvino import opset13 as op

from tests.support.tiny_encoder import WORDS, wordpiece_tokenizer, write_json

SIZE, POSITIONS = 8, 64


class TinyDecoder:
    """One layer of causal attention over token and position vectors."""

    def __init__(self, seed=0):
        random = np.random.default_rng(seed)
        self.tokens = random.standard_normal((len(WORDS), SIZE)).astype(np.float32)
        self.positions = random.standard_normal((POSITIONS, SIZE)).astype(np.float32)
        self.output = random.standard_normal((SIZE, SIZE)).astype(np.float32)

    def last(self, ids):
        """The vector of a text's last token, of length 1: by NumPy, without padding and masks."""
        x = self.tokens[ids] + self.positions[: len(ids)]
        scores = x[-1] @ x.T / np.sqrt(SIZE)
        weights = np.exp(scores - scores.max())
        vector = (weights / weights.sum()) @ x @ self.output
        return vector / np.linalg.norm(vector)

    def write(self, directory, *, modules=True):
        """Write the directory; without `modules` nothing in it says how to pool."""
        directory.mkdir()
        ov.save_model(self._graph(), directory / "openvino_model.xml", compress_to_fp16=False)
        write_json(directory / "config.json", {"model_type": "qwen3", "max_position_embeddings": POSITIONS})
        (directory / "tokenizer.json").write_text(wordpiece_tokenizer())
        if modules:
            kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
            chain = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for kind, path in kinds.items()]
            write_json(directory / "modules.json", chain)
            modes = {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
            write_json(directory / "1_Pooling/config.json", modes)
        return directory

    def _graph(self):
        ids, mask, positions = (op.parameter([-1, -1], np.int64, name=name) for name in _INPUTS)
        zero = op.constant(np.int64(0))
        x = op.add(op.gather(self.tokens, ids, zero), op.gather(self.positions, positions, zero))
        scores = op.multiply(op.matmul(x, x, False, True), op.constant(np.float32(1 / np.sqrt(SIZE))))
        rows, columns = op.unsqueeze(positions, op.constant([2])), op.unsqueeze(positions, op.constant([1]))
        visible = op.logical_and(
            op.less_equal(columns, rows), op.convert(op.unsqueeze(mask, op.constant([1])), "boolean")
        )
        scores = op.select(visible, scores, op.constant(np.float32(-1e9)))
        hidden = op.matmul(op.matmul(op.softmax(scores, 2), x, False, False), op.constant(self.output), False, False)
        for node, name in zip((ids, mask, positions), _INPUTS, strict=True):
            node.output(0).set_names({name})
        hidden.output(0).set_names({"last_hidden_state"})
        return ov.Model([op.result(hidden)], [ids, mask, positions], "decoder")


_INPUTS = ("input_ids", "attention_mask", "position_ids")
