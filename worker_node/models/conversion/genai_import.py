"""GenAI's own import of a GGUF file: it knows the graph and the tokenizer of each architecture.

Its weights are not the file's (it rounds the minimum of every group to a whole number of steps), so only the
graph and the tokenizer are taken from it.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import openvino as ov
import openvino_genai

from worker_node.core.errors import ConversionFailed

TOKENIZER_FILES = (
    "openvino_tokenizer.xml",
    "openvino_tokenizer.bin",
    "openvino_detokenizer.xml",
    "openvino_detokenizer.bin",
)
_NO_DEVICE = "NONE"
# The error for it names it; any other is about the import, whatever has been written by then.
_NAMES_NO_DEVICE = re.compile(rf'[Dd]evice.*"{_NO_DEVICE}"')
# The value cache of each layer is named as if it were a second key cache; on an NPU the names become those of
# inputs and outputs, which must differ.
_MISNAMED_VALUE_CACHE = re.compile(r"(past_key_values\.(\d+)\.valuepresent\.\2\.)key")


def import_graph(gguf: Path, target: Path, scratch: Path) -> ov.Model:
    """Import the file; leaves the tokenizer in `target` and returns the graph, with GenAI's approximate
    weights.

    Raises ConversionFailed when GenAI does not know the architecture.
    """
    linked = scratch / "model.gguf"
    linked.symlink_to(gguf.resolve())
    failure: RuntimeError | None = None
    try:
        # It writes the files, then compiles them, for nothing: on a device that does not exist that fails at once.
        openvino_genai.LLMPipeline(linked, _NO_DEVICE, enable_save_ov_model=True, ATTENTION_BACKEND="SDPA")
    except RuntimeError as error:
        failure = error
    missing = [name for name in ("openvino_model.xml", *TOKENIZER_FILES) if not (scratch / name).is_file()]
    if failure is None or missing or _NAMES_NO_DEVICE.search(str(failure)) is None:
        reason = failure or f"it compiled the model for {_NO_DEVICE}"
        raise ConversionFailed(f"{gguf}: OpenVINO GenAI cannot import it ({reason})") from failure
    for name in TOKENIZER_FILES:
        shutil.move(scratch / name, target / name)
    graph = scratch / "openvino_model.xml"
    graph.write_text(_MISNAMED_VALUE_CACHE.sub(r"\1value", graph.read_text()))
    return ov.Core().read_model(graph)
