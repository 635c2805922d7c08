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
        write_json(directory / "tokenizer.json", wordpiece_tokenizer())
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


class TinyRanker(TinyDecoder):
    """A decoder that ranks, in Qwen3-Reranker's form: the next token is "yes" or "no". Random, so it knows nothing.

    Its tokenizer is a byte-level BPE with the way in which Qwen's splits texts, trained on a few sentences.
    """

    positions_known = 512

    def __init__(self, seed=0):
        super().__init__(seed)
        random = np.random.default_rng(seed + 1)
        self.tokenizer = qwen_tokenizer()
        self.tokens = random.standard_normal((self.tokenizer.get_vocab_size(), SIZE)).astype(np.float32)
        self.positions = random.standard_normal((self.positions_known, SIZE)).astype(np.float32)

    def logits(self, ids):
        """The logits of "no" and "yes" after a prompt: by NumPy, token by token without masks and cache."""
        x = self.tokens[ids] + self.positions[: len(ids)]
        scores = x[-1] @ x.T / np.sqrt(SIZE)
        weights = np.exp(scores - scores.max())
        hidden = (weights / weights.sum()) @ x @ self.output
        return np.array([self.tokens[self.tokenizer.token_to_id(word)] @ hidden for word in ("no", "yes")])

    def write(self, directory, *, architecture="Qwen3ForCausalLM"):
        directory.mkdir()
        ov.save_model(self._causal_graph(), directory / "openvino_model.xml", compress_to_fp16=False)
        config = {"architectures": [architecture], "model_type": "qwen3"}
        write_json(directory / "config.json", config | {"max_position_embeddings": self.positions_known})
        self.tokenizer.save(str(directory / "tokenizer.json"))
        return directory

    def _causal_graph(self):
        """As exported without a cache: it ends in the logits of all words at all places."""
        encoder = self._graph()
        hidden = encoder.outputs[0].get_node().input_value(0)
        hidden.set_names(set())
        logits = op.matmul(hidden, op.constant(self.tokens), False, True)
        logits.output(0).set_names({"logits"})
        return ov.Model([op.result(logits)], encoder.get_parameters(), "decoder")


QWEN_SPLITS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SENTENCES = (
    "yes yes no no no yes",
    "how tall is the eiffel tower?\nhow tall is it?\n",
    "<Instruct>: Given a web search query, retrieve relevant passages\n<Query>: what?\n<Document>: the document",
)


def qwen_tokenizer():
    """A tokenizer of Qwen's kind with some hundred tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLITS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        show_progress=False,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(10 * _SENTENCES, trainer)
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer


# Written out, as the model card has them.
CARD_PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
CARD_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def ranking_prompt(tokenizer, instruction, query, document, limit=8192):
    """The tokens of a prompt in the words of the model card: the middle is cut at its end, then all is put together."""
    middle = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    prefix, middle, suffix = (
        tokenizer.encode(text, add_special_tokens=False).ids for text in (CARD_PREFIX, middle, CARD_SUFFIX)
    )
    return [*prefix, *middle[: limit - len(prefix) - len(suffix)], *suffix]
