"""The tokenizer and detokenizer graphs and the chat template of a model.

`openvino_genai.Tokenizer` holds the GIL while it compiles them, for half a second and more, and would stop the event
loop; OpenVINO's own calls release it. The graphs are changed as GenAI changes them, so the tokens are the same."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
import openvino_tokenizers
from openvino import opset13

_TOKENIZER, _DETOKENIZER = "openvino_tokenizer.xml", "openvino_detokenizer.xml"
# A call is too short to be divided among threads.
_PROPERTIES = {"INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1}
# GenAI's own: some operations turn larger numbers negative.
_NO_LIMIT = np.iinfo(np.int32).max - 64
_SPECIAL = "add_special_tokens"
# Strings are made with the GIL held: of this many, in a few milliseconds.
_AT_ONCE = 4096


class TokenizerGraph:
    """Texts to token ids. Raises RuntimeError for files that are damaged."""

    def __init__(self, directory: Path) -> None:
        model = _core().read_model(directory / _TOKENIZER)
        self._takes_special = _add_special_input(model)
        self.info = {name: int(model.get_rt_info([name]).astype(int)) for name in _IDS if model.has_rt_info([name])}
        self._request = _core().compile_model(model, "CPU", _PROPERTIES).create_infer_request()
        self._one = threading.Lock()

    def encode(self, text: str, *, special: bool) -> list[int]:
        """The token ids of a text; with `special` those that the model wants around it are added."""
        inputs: dict[str | int, Any] = {0: ov.Tensor([text])}
        if self._takes_special:
            inputs[_SPECIAL] = np.asarray(special)
        with self._one:
            self._request.infer(inputs)
            tokens: list[int] = self._request.get_tensor("input_ids").data.reshape(-1).tolist()
        return tokens


class DetokenizerGraph:
    """Token ids to text. `special` are the tokens that have no text unless it is asked for.

    `vocabulary` is the bytes of each token. Raises RuntimeError for files that are damaged or of another make.
    """

    def __init__(self, directory: Path) -> None:
        model = _core().read_model(directory / _DETOKENIZER)
        self.vocabulary, self.special = _take_vocabulary(model)
        self._request = _core().compile_model(model, "CPU", _PROPERTIES).create_infer_request()
        self._one = threading.Lock()

    def decode(self, tokens: Sequence[int], *, skip_special: bool) -> str:
        """The text of tokens of the vocabulary."""
        kept = [token for token in tokens if not (skip_special and token in self.special)]
        if not kept:
            return ""
        return self._decode(np.asarray(kept, np.int64)[None])[0]

    def decode_each(self, count: int) -> list[str]:
        """The text of each of the first `count` tokens by itself, special ones included."""
        texts: list[str] = []
        for start in range(0, count, _AT_ONCE):
            texts += self._decode(np.arange(start, min(count, start + _AT_ONCE), dtype=np.int64)[:, None])
        return texts

    def _decode(self, rows: np.ndarray[Any, np.dtype[np.int64]]) -> list[str]:
        with self._one:
            self._request.infer([rows])
            # NumPy's strings end before NUL characters at their end.
            texts: list[str] = self._request.get_output_tensor(0).str_data.tolist()
        return texts


_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@cache
def _core() -> ov.Core:
    core = ov.Core()
    core.add_extension(str(openvino_tokenizers._ext_path))  # noqa: SLF001  (its only name)
    return core


def _add_special_input(model: ov.Model) -> bool:
    """Make special tokens an input of the graph, and lift its limit of length; False where none are ever added."""
    combine = _last(model, "CombineSegments")
    if combine is None:
        return False
    special: list[Any] = []
    texts = 0
    limit: Any = None
    for index in range(0, combine.get_input_size() - 1, 3):
        begins, ends = (combine.input_value(index + offset).get_node() for offset in (0, 1))
        if ends.get_type_name() == "Truncate":
            texts += 1
            limit = ends
        elif ends.get_type_name() == "Add" or begins.get_type_name() == "Subtract":
            texts += 1
            limit = ends if ends.get_type_name() == "Add" else begins
        else:
            special.append(combine.input(index + 1))
    if limit is not None:
        _lift(limit, texts)
    if not special:
        return False
    flag = opset13.parameter([], np.bool_, name=_SPECIAL)
    flag.output(0).set_names({_SPECIAL})
    zero = opset13.constant(0, np.int32)
    for ends in special:
        ends.replace_source_output(opset13.select(flag, ends.get_source_output(), zero).output(0))
    model.add_parameters([flag])
    model.validate_nodes_and_infer_types()
    return True


def _lift(node: Any, texts: int) -> None:
    """Let no text be cut: too long ones are refused with their length."""
    at = 3 * texts
    if node.get_type_name() != "Truncate":
        node, at = node.input_value(1).get_node(), 1
        if node.get_type_name() != "Minimum":
            return
    if at < node.get_input_size() and node.input_value(at).get_node().get_type_name() == "Constant":
        old = node.input_value(at)
        lifted = opset13.constant(np.full(list(old.get_shape()), _NO_LIMIT, np.int32))
        for target in old.get_target_inputs():
            target.replace_source_output(lifted.output(0))


def _take_vocabulary(model: ov.Model) -> tuple[list[bytes], frozenset[int]]:
    """The tokens' bytes and the special tokens of the graph, which shows these from now on."""
    decoder = _last(model, "VocabDecoder")
    if decoder is None:
        raise RuntimeError("the detokenizer has no VocabDecoder; export it again with openvino_tokenizers")
    special: frozenset[int] = frozenset()
    if decoder.get_input_size() > 4:
        node = decoder.input_value(4).get_node()
        if node.get_type_name() == "Slice":
            node = node.input_value(0).get_node()
        if node.get_type_name() == "Constant":
            special = frozenset(np.asarray(node.data).reshape(-1).tolist())
            decoder.input(4).replace_source_output(opset13.constant(np.zeros(0, np.int32)).output(0))
    nodes = [decoder.input_value(index).get_node() for index in (1, 2, 3)]
    if any(node.get_type_name() != "Constant" for node in nodes):
        raise RuntimeError("the detokenizer's vocabulary is not constant; export it again with openvino_tokenizers")
    begins, ends, chars = (np.asarray(node.data) for node in nodes)
    text = chars.tobytes()
    return [text[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)], special


def _last(model: ov.Model, kind: str) -> Any:
    """The last operation of a type, None where there is none."""
    return next((node for node in reversed(model.get_ordered_ops()) if node.get_type_name() == kind), None)


# Where GenAI looks for special tokens.
_CONFIGURATION = ("config.json", "special_tokens_map.json", "tokenizer_config.json")
_NAMES = ("bos", "eos", "pad")


class TemplateRenderer:
    """Renders conversations in a model's own chat template.

    It is GenAI's tokenizer without the graphs, which take half a second to compile with the GIL held.

    `ids` are the special tokens that the tokenizer's graph names, as `eos_token_id`; `decode` is the text of a token.
    """

    def __init__(self, directory: Path, template: str, ids: Mapping[str, int], decode: Callable[[int], str]) -> None:
        with tempfile.TemporaryDirectory() as without_graphs:
            for name in _CONFIGURATION:
                if (directory / name).is_file():
                    shutil.copyfile(directory / name, Path(without_graphs) / name)
            self._tokenizer = genai.Tokenizer(without_graphs)
        if template:
            self._tokenizer.set_chat_template(template)
        self.special_ids: dict[str, int] = {}
        self._variables: dict[str, str] = {}
        for name in _NAMES:
            known = getattr(self._tokenizer, f"get_{name}_token_id")()
            self.special_ids[name] = token = int(ids.get(f"{name}_token_id", known))
            text = str(getattr(self._tokenizer, f"get_{name}_token")())
            self._variables[f"{name}_token"] = text or (decode(token) if token >= 0 else "")

    @property
    def template(self) -> str:
        """The template in Jinja; empty where there is none."""
        return str(self._tokenizer.chat_template)

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        answer_prompt: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as text. Raises RuntimeError if the template does not take it."""
        return str(
            self._tokenizer.apply_chat_template(
                list(messages),
                add_generation_prompt=answer_prompt,
                tools=tools,
                extra_context=self._variables | dict(variables or {}),
            )
        )
