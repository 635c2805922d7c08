"""OpenVINO's own runs of the tokenizer graphs give what GenAI's tokenizer gives, and leave the event loop free."""

import shutil
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai
import pytest
from openvino import opset13
from openvino_tokenizers import _get_factory

from worker_node.core.types import Message
from worker_node.tasks.generate.tokenization import ChatTokenizer
from worker_node.tasks.generate.tokenizer import DetokenizerGraph, TokenizerGraph, _core

pytestmark = pytest.mark.slow

TEXTS = [
    "hello",
    "The lighthouse keeper counted 12 ships, 3 of them red. " * 8,
    "<|im_start|>user\nhi<|im_end|>\n",
    "漢🙂é\u200b\x00 x",
    " ",
]
BOS, EOS = 5, 7


@pytest.fixture(scope="module")
def smollm(store):
    return store.get("smollm2-135m-instruct").path


@pytest.fixture(scope="module")
def with_special_tokens(smollm, tmp_path_factory):
    """The tokenizer with a token before and one after each text, as of Llama and Gemma, cut at 20 tokens."""
    directory = tmp_path_factory.mktemp("special") / "model"
    shutil.copytree(smollm, directory)
    model = _core().read_model(smollm / "openvino_tokenizer.xml")
    nodes = {node.get_type_name(): node for node in model.get_ordered_ops()}
    dense, tokens = nodes["RaggedToDense"], nodes["BPETokenizer"]
    begins, ends, ids = tokens.outputs()
    cut = opset13.minimum(opset13.subtract(ends, begins), opset13.constant(20, np.int32))
    zero, one = (opset13.constant(value, np.int32).output(0) for value in (0, 1))
    bos, eos, segments = (opset13.constant(value, np.int32).output(0) for value in ([BOS], [EOS], [0, 0, 0]))
    parts = [zero, one, bos, begins, opset13.add(begins, cut).output(0), ids, zero, one, eos, segments]
    whole = _get_factory("opset1").create("CombineSegments", parts)
    for index in range(3):
        dense.input(index).replace_source_output(whole.output(index))
    longest = opset13.reduce_max(opset13.subtract(whole.output(1), whole.output(0)), opset13.constant([0]))
    dense.input(3).replace_source_output(longest.output(0))
    model.validate_nodes_and_infer_types()
    ov.save_model(model, directory / "openvino_tokenizer.xml", compress_to_fp16=False)
    return directory


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("which", ["smollm", "with_special_tokens"])
def test_tokens_are_those_of_genai(request, which, special):
    directory = request.getfixturevalue(which)
    ours, genai = TokenizerGraph(directory), openvino_genai.Tokenizer(directory)
    for text in TEXTS:
        expected = genai.encode(text, add_special_tokens=special).input_ids.data[0].tolist()
        assert ours.encode(text, special=special) == expected
        if which == "with_special_tokens" and special:
            assert (expected[0], expected[-1]) == (BOS, EOS)
    assert len(ours.encode(TEXTS[1], special=False)) > 20


def test_text_and_vocabulary_are_those_of_genai(smollm):
    ours, genai = DetokenizerGraph(smollm), openvino_genai.Tokenizer(smollm)
    assert {piece: token for token, piece in enumerate(ours.vocabulary)} == genai.get_vocab()
    tokens = genai.encode("".join(TEXTS)).input_ids.data[0].tolist()
    for skip in (True, False):
        assert ours.decode(tokens, skip_special=skip) == genai.decode(tokens, skip_special_tokens=skip)
    assert ours.decode_each(300)[:40] == genai.decode([[token] for token in range(40)], skip_special_tokens=False)
    assert ours.decode([1], skip_special=True) == ""


def test_a_conversation_is_rendered_as_by_genai_with_its_special_tokens(smollm, tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(smollm, directory)
    template = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ messages[0].content }}|{{ enable_thinking }}"
    (directory / "chat_template.jinja").write_text(template)
    genai = openvino_genai.Tokenizer(directory)
    genai.set_chat_template(template)
    history = [{"role": "user", "content": "hello"}]
    expected = genai.apply_chat_template(history, add_generation_prompt=True, extra_context={"enable_thinking": False})
    ours = ChatTokenizer(directory, 8192)
    assert ours.render([Message("user", "hello")], think=False) == expected
    assert expected.startswith("<|im_start|>|<|im_end|>|")
    assert ours.end_tokens == {genai.get_eos_token_id()}


def test_genai_compiles_no_graph_in_this_process(smollm, monkeypatch):
    """Its constructor would hold the GIL meanwhile."""
    seen, tokenizer = [], openvino_genai.Tokenizer

    def watched(directory):
        seen.append({path.suffix for path in Path(directory).iterdir()})
        return tokenizer(directory)

    monkeypatch.setattr(openvino_genai, "Tokenizer", watched)
    ChatTokenizer(smollm, 8192)
    assert seen == [{".json"}]
