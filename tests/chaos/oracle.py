"""Right answers from raw OpenVINO graphs in full precision: nothing of the node or its engines takes part.

Greedy answers are compared in full precision, because with less the numbers depend on what else a step computes. Where
the two best tokens of a step are nearly as likely, even the rounding of float32 could choose either, so only prompts
are used whose answer has a clear best token at each step.
"""

import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import numpy as np

# What makes an OpenVINO model on a CPU compute in float32 throughout; the nodes of a chaos run get the same.
FULL_PRECISION = {
    "INFERENCE_PRECISION_HINT": "f32",
    "KV_CACHE_PRECISION": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
}
# Logits. Rounding in float32 moves them by some 1e-4.
CLEAR_MARGIN = 0.05
MIN_COSINE = 0.9999


@dataclass
class References:
    """`vectors`: by vector space and text. `answers`: the text that follows each prompt."""

    vectors: dict
    answers: dict

    def check_vectors(self, space, texts, vectors):
        known = self.vectors.get(space)
        if known is None:
            return f"a vector space that no model here has: {space}"
        wanted = np.stack([known[text] for text in texts])
        if wanted.shape != vectors.shape:
            return f"shape {vectors.shape} in a space of {wanted.shape}"
        cosines = (wanted * vectors).sum(axis=1) / np.linalg.norm(wanted, axis=1) / np.linalg.norm(vectors, axis=1)
        # Written so that NaN fails.
        return None if cosines.min() >= MIN_COSINE else f"cosine {cosines.min():.5f} to the reference"

    def check_answer(self, prompt, text):
        return None if text == self.answers[prompt] else f"answer {text!r}, not {self.answers[prompt]!r}"


def references(embedders, generator, prompts, tokens):
    """Compute references in a process of its own, which takes its memory with it.

    `embedders`: model directories and the texts for each. `prompts`: lists of candidates and how many of each list are
    wanted; those without near ties come first in their order. Raises ValueError when a list has too few.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        vectors = {
            json.loads((directory / "npu-node.json").read_bytes())["space"]: process.submit(_embed, directory, texts)
            for directory, texts in embedders
        }
        answers = [process.submit(_answer, generator, candidates, wanted, tokens) for candidates, wanted in prompts]
        return References(
            {space: future.result() for space, future in vectors.items()},
            {prompt: text for future in answers for prompt, text in future.result().items()},
        )


def _embed(directory, texts):
    import openvino as ov
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    limit = json.loads((directory / "npu-node.json").read_bytes())["context_limit"]
    tokenizer.enable_truncation(limit)
    tokenizer.no_padding()
    model = ov.Core().compile_model(directory / "openvino_model.xml", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    vectors = {}
    for text in texts:
        ids = np.array([tokenizer.encode(text).ids], np.int64)
        vectors[text] = model({"input_ids": ids, "attention_mask": np.ones_like(ids)})[0][0].copy()
    return vectors


def _answer(directory, candidates, wanted, tokens):
    import openvino as ov
    import openvino_genai as genai

    tokenizer = genai.Tokenizer(str(directory))
    request = ov.Core().compile_model(directory / "openvino_model.xml", "CPU", FULL_PRECISION).create_infer_request()
    ends = json.loads((directory / "generation_config.json").read_bytes())["eos_token_id"]
    answers = {}
    for prompt in candidates:
        chat = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True)
        ids = tokenizer.encode(chat, add_special_tokens=False).input_ids.data[0].tolist()
        chosen, margin = _greedy(request, ids, tokens, {ends} if isinstance(ends, int) else set(ends))
        if margin >= CLEAR_MARGIN:
            answers[prompt] = str(tokenizer.decode(chosen))
        if len(answers) == wanted:
            return answers
    raise ValueError(f"of {len(candidates)} prompts only {len(answers)} have no near ties")


def _greedy(request, ids, tokens, ends):
    """The likeliest continuation, and its least margin over the second likeliest token of a step."""
    request.reset_state()
    chosen, margin, past, step = [], np.inf, 0, ids
    while len(chosen) < tokens:
        past += len(step)
        logits = request.infer(
            {
                "input_ids": np.array([step], np.int64),
                "attention_mask": np.ones((1, past), np.int64),
                "position_ids": np.arange(past - len(step), past, dtype=np.int64)[None],
                "beam_idx": np.zeros(1, np.int32),
            }
        )["logits"][0, -1]
        second, best = np.sort(logits)[-2:]
        margin = min(margin, float(best - second))
        token = int(logits.argmax())
        if token in ends:
            break
        chosen.append(token)
        step = [token]
    return chosen, margin
