"""Tiny models with random weights, in the forms in which models are published: converted in seconds."""

import gguf
import numpy as np
import pytest

from tests.support.scripted_hub import ScriptedHub
from tests.support.tiny_encoder import write_encoder
from worker_node.core.errors import ConversionFailed, NodeError
from worker_node.models import pull
from worker_node.models.convert.job import perform
from worker_node.models.store import STORE_VARIABLE


@pytest.fixture
def make_bert(tmp_path):
    """Writes a tiny sentence encoder (see `write_encoder`); returns its directory and its tensors."""

    def make(name="bert", **options):
        return tmp_path / name, write_encoder(tmp_path / name, **options)

    return make


def byte_tokens():
    """The 256 characters by which byte-level tokenizers write bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [names[byte] for byte in range(256)]


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HIDDEN, HEADS, KV_HEADS, INNER, LAYERS = 64, 4, 2, 256, 2


def add_hyperparameters(writer, hidden):
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(hidden // HEADS)
    writer.add_key_length(hidden // HEADS)
    writer.add_value_length(hidden // HEADS)
    writer.add_file_type(3)


def add_tokenizer(writer, kind):
    """A byte-level tokenizer with two merges; returns the size of its vocabulary."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_tokens(), "he", "ll"]
    tokens += [f"<unused{i}>" for i in range(-len(tokens) % 32)]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges(["h e", "l l"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHATML)
    return len(tokens)


def tensor_shapes(vocabulary, architecture, hidden=HIDDEN):
    """Every tensor of the tiny model with its shape, as llama.cpp names them."""
    kv_size = hidden // HEADS * KV_HEADS
    block = {
        "attn_norm": (hidden,),
        "ffn_norm": (hidden,),
        "attn_q": (hidden, hidden),
        "attn_k": (kv_size, hidden),
        "attn_v": (kv_size, hidden),
        "attn_output": (hidden, hidden),
        "ffn_gate": (INNER, hidden),
        "ffn_up": (INNER, hidden),
        "ffn_down": (hidden, INNER),
    }
    if architecture == "qwen2":
        block |= {"attn_q.bias": (hidden,), "attn_k.bias": (kv_size,), "attn_v.bias": (kv_size,)}
    if architecture == "qwen3":
        block |= {"attn_q_norm": (hidden // HEADS,), "attn_k_norm": (hidden // HEADS,)}
    names = {name if name.endswith(".bias") else f"{name}.weight": shape for name, shape in block.items()}
    blocks = {f"blk.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in names.items()}
    return {"token_embd.weight": (vocabulary, hidden), "output_norm.weight": (hidden,), **blocks}


@pytest.fixture(scope="session")
def make_gguf(tmp_path_factory):
    """Writes a tiny Llama as a GGUF file with Q4_1 matrices, as the embedded model has them; returns its path.

    `stored_twice`: the tied matrix is there for the output, too, in another quantization. `extra` are shapes of more
    tensors, `scaling` is the type of its rotary scaling, `rows` the length of its embedding table, `window` that of its
    sliding window, `hidden` that of its vectors. Quantizations that gguf cannot make get random bytes.
    """

    def make(
        name="tiny.gguf",
        *,
        architecture="llama",
        quantization=gguf.GGMLQuantizationType.Q4_1,
        stored_twice=False,
        extra=(),
        scaling=None,
        rows=None,
        window=None,
        tokenizer="gpt2",
        hidden=HIDDEN,
    ):
        path = tmp_path_factory.mktemp("gguf") / name
        writer = gguf.GGUFWriter(path, architecture)
        add_hyperparameters(writer, hidden)
        vocabulary = add_tokenizer(writer, tokenizer)
        if scaling is not None:
            writer.add_rope_scaling_type(scaling)
        if window is not None:
            writer.add_sliding_window(window)
        random = np.random.default_rng(0)

        def add(tensor, values, kind):
            try:
                stored = gguf.quants.quantize(values, kind)
            except NotImplementedError:
                stored = random.integers(0, 64, gguf.quant_shape_to_byte_shape(values.shape, kind), np.uint8)
            writer.add_tensor(tensor, stored, raw_dtype=kind)

        for tensor, shape in (tensor_shapes(rows or vocabulary, architecture, hidden) | dict(extra)).items():
            values = random.standard_normal(shape).astype(np.float32)
            if len(shape) == 1:
                writer.add_tensor(tensor, 1 + np.float32(0.3) * values)
            else:
                add(tensor, np.float32(0.2) * values, quantization)
            if stored_twice and tensor == "token_embd.weight":
                add("output.weight", np.float32(0.2) * values, gguf.GGMLQuantizationType.Q8_0)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return make


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A scripted hub; the environment of this process and its children points to it, without a token."""
    import huggingface_hub as client  # slow, and few tests need it

    with ScriptedHub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield hub
        client.close_session()


@pytest.fixture
def store_root(tmp_path, monkeypatch):
    """A store of the test's own, also for the commands and child processes that it starts."""
    root = tmp_path / "store"
    monkeypatch.setenv(STORE_VARIABLE, str(root))
    monkeypatch.setenv("NPU_NODE_URL", "none")
    return root


@pytest.fixture
def in_process(monkeypatch):
    """Convert in this process: starting another takes half a second, and what it makes is the same."""

    def convert(job, progress):
        try:
            perform(job, progress.stage)
        except NodeError as error:
            raise ConversionFailed(error.message) from None

    monkeypatch.setattr(pull, "convert", convert)
