"""The repositories of the catalog as their publishers lay them out, from public listings and by memory: all small files
with the options that they have there, and tiny tensors in place of the weights."""

from dataclasses import replace

import numpy as np
import openvino as ov
from openvino import opset13 as op

from tests.support.cross_encoders import write_tiny
from tests.support.scripted_hub import Repository
from tests.support.tiny_encoder import write_encoder, write_json

# Beside the model in most repositories; none of it is wanted.
_EXTRAS = {
    ".gitattributes": b"*.bin filter=lfs",
    "README.md": b"# A model",
    "pytorch_model.bin": b"pickled",
    "onnx/model.onnx": b"onnx",
    "onnx/model_O4.onnx": b"onnx",
    "openvino/openvino_model.xml": b"<net/>",
    "openvino/openvino_model.bin": b"weights",
    "vocab.txt": b"[PAD]",
    "special_tokens_map.json": b"{}",
    "tf_model.h5": b"tf",
    "rust_model.ot": b"rust",
}
_VERSIONS = {"__version__": {"sentence_transformers": "2.2.2", "transformers": "4.28.1", "pytorch": "1.13.0+cu117"}}
_BERT = {
    "_name_or_path": "somewhere",
    "attention_probs_dropout_prob": 0.1,
    "classifier_dropout": None,
    "hidden_dropout_prob": 0.1,
    "id2label": {"0": "LABEL_0"},
    "initializer_range": 0.02,
    "label2id": {"LABEL_0": 0},
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "torch_dtype": "float32",
    "transformers_version": "4.30.0",
    "use_cache": True,
    "gradient_checkpointing": False,
}
_MXBAI_PROMPT = "Represent this sentence for searching relevant passages: "

# By the beginning of the repository's name: pooling, normalisation, sentence_bert_config.json and the rest.
_ENCODERS = {
    "BAAI/bge-": {"pooling": "cls_token", "sentence": {"max_seq_length": 512, "do_lower_case": True}},
    "intfloat/e5-": {"sentence": {"max_seq_length": 512, "do_lower_case": False}},
    "thenlper/gte-": {"sentence": {"max_seq_length": 512, "do_lower_case": False}},
    "sentence-transformers/": {"sentence": {"max_seq_length": 128, "do_lower_case": False}},
    "mixedbread-ai/": {
        "pooling": "cls_token",
        "normalise": False,
        "sentence": {"max_seq_length": 512, "do_lower_case": False},
        "transformers": {"prompts": {"query": _MXBAI_PROMPT, "passage": ""}, "default_prompt_name": None},
        "extras": {"gguf/mxbai-embed-large-v1-f16.gguf": b"GGUF", "onnx/model_quantized.onnx": b"onnx"},
    },
}
_CROSS_ENCODERS = {
    "cross-encoder/": ("BertForSequenceClassification", {"sentence_transformers": {"activation_fn": "Identity"}}),
    "BAAI/bge-reranker-": ("XLMRobertaForSequenceClassification", {"bos_token_id": 0, "eos_token_id": 2}),
}

_GRAPHS = [f"openvino_{part}" for part in ("encoder_model", "decoder_model", "tokenizer", "detokenizer")]
WHISPER = {
    "config.json": b'{"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper"}',
    "generation_config.json": b"{}",
    "preprocessor_config.json": b"{}",
    **{f"{graph}{suffix}": graph.encode() for graph in _GRAPHS for suffix in (".xml", ".bin")},
}

# Of config.json, by what the repository's name contains: model_type, architecture, context.
_DECODERS = {
    "Qwen3-": ("qwen3", "Qwen3ForCausalLM", 40960),
    "DeepSeek-R1-Distill-Qwen": ("qwen2", "Qwen2ForCausalLM", 131072),
    "Qwen2.5-": ("qwen2", "Qwen2ForCausalLM", 32768),
    "Phi-3-mini-4k": ("phi3", "Phi3ForCausalLM", 4096),
    "Phi-3.5-mini": ("phi3", "Phi3ForCausalLM", 131072),
    "Phi-4-mini": ("phi3", "Phi3ForCausalLM", 131072),
    "phi-2": ("phi", "PhiForCausalLM", 2048),
    "Mistral-7B": ("mistral", "MistralForCausalLM", 32768),
    "granite-4": ("granite", "GraniteForCausalLM", 131072),
    "Llama-3": ("llama", "LlamaForCausalLM", 131072),
    "TinyLlama": ("llama", "LlamaForCausalLM", 2048),
    "open_llama": ("llama", "LlamaForCausalLM", 2048),
}
# The GGUF files of the repository, with the names of their quantizations.
_GGUF = {
    "Qwen/Qwen2.5-0.5B-Instruct-GGUF": (
        "qwen2",
        "qwen2.5-0.5b-instruct-{}.gguf",
        ("fp16", "q2_k", "q3_k_m", "q4_0", "q4_k_m", "q5_0", "q5_k_m", "q6_k", "q8_0"),
    ),
    "Qwen/Qwen3-4B-GGUF": ("qwen3", "Qwen3-4B-{}.gguf", ("Q4_K_M", "Q5_0", "Q5_K_M", "Q6_K", "Q8_0")),
}


def _by_name(table, repo):
    return next(value for name, value in table.items() if name in repo)


def files_of(directory):
    found = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in found}


def _encoder(repo, directory):
    published = _by_name(_ENCODERS, repo)
    shape = {name: published[name] for name in ("pooling", "normalise") if name in published}
    write_encoder(directory, **_BERT, **shape)
    write_json(directory / "sentence_bert_config.json", published["sentence"])
    write_json(directory / "config_sentence_transformers.json", _VERSIONS | published.get("transformers", {}))
    write_json(directory / "tokenizer_config.json", {"model_max_length": 512, "tokenizer_class": "BertTokenizer"})
    return files_of(directory) | _EXTRAS | published.get("extras", {})


def _cross_encoder(repo, directory):
    architecture, more = _by_name(_CROSS_ENCODERS, repo)
    bert = {name: value for name, value in _BERT.items() if name not in {"id2label", "pad_token_id"}}
    write_tiny(directory, architecture=architecture, **bert, **more)
    write_json(directory / "tokenizer_config.json", {"model_max_length": 512})
    return files_of(directory) | _EXTRAS


def _decoder(entry, directory):
    model_type, architecture, context = _by_name(_DECODERS, entry.source.repo)
    directory.mkdir()
    ids = op.parameter([-1, -1], np.int64, name="input_ids")
    logits = op.gather(op.constant(np.ones((8, 4), np.float32)), ids, op.constant(np.int64(0)))
    logits.output(0).set_names({"logits"})
    ov.save_model(ov.Model([op.result(logits)], [ids], "Model0"), directory / "openvino_model.xml")
    sizes = {"model_type": model_type, "architectures": [architecture], "max_position_embeddings": context}
    write_json(directory / "config.json", sizes | entry.config)
    write_json(directory / "generation_config.json", {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20})
    template = "{% for m in messages %}<|im_start|>{{ m['content'] }}{% endfor %}"
    write_json(directory / "tokenizer_config.json", {"chat_template": template, "model_max_length": 131072})
    write_json(directory / "openvino_config.json", {"dtype": "int4", "quantization_config": None})
    names = [f"openvino_{part}.{form}" for part in ("tokenizer", "detokenizer") for form in ("xml", "bin")]
    others = dict.fromkeys(["tokenizer.json", "vocab.json", "added_tokens.json", "special_tokens_map.json"], b"{}")
    others |= {"merges.txt": b"", "README.md": b"# A model"}
    return files_of(directory) | dict.fromkeys(names, b"graph") | others


def repository_of(entry, directory, make_gguf):
    """The repository of a model of the catalog; `directory` is for its files."""
    repo = entry.source.repo
    if repo in _GGUF:
        architecture, name, tags = _GGUF[repo]
        model = make_gguf(architecture=architecture).read_bytes()
        # Other quantizations must not be taken.
        files = {name.format(tag): model if tag.upper() == entry.source.tag else b"GGUF" for tag in tags}
        return Repository(files | {"README.md": b"# A model"}, gguf={"architecture": architecture})
    if entry.kind == "transcription":
        return Repository(WHISPER | {"README.md": b"# A model"})
    if entry.kind == "rerank":
        return Repository(_cross_encoder(repo, directory))
    return Repository(_encoder(repo, directory) if entry.kind == "embedding" else _decoder(entry, directory))


def install(store, source, name=None, progress=None, **options):
    """Install local files in a store; `options` are fields of `PullSpec`."""
    return store.pull(replace(store.pull_spec(str(source.resolve()), model_id=name), **options), progress)
