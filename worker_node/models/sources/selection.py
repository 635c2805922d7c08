"""What a repository holds decides what happens to it: adopted, converted, built, or rejected with the way out.

Pure: it reads a listing, and the repository's small configuration files, which were fetched before.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from worker_node.core.errors import SourceRejected
from worker_node.models.catalog import SourceFormat
from worker_node.models.directory import GENERATION_FILES
from worker_node.models.files import files_of_task
from worker_node.models.manifest import MODEL_FILE, WEIGHTS_FILE
from worker_node.models.sources.export import export_command
from worker_node.models.sources.listing import Listing, RemoteFile

SAFETENSORS_FILE = "model.safetensors"
# Small files that say what a model is; they are read before anything large is fetched.
CONFIG_FILES = frozenset(
    {
        "config.json",
        "generation_config.json",
        "openvino_config.json",
        "tokenizer_config.json",
        "modules.json",
        "sentence_bert_config.json",
        "config_sentence_transformers.json",
        "1_Pooling/config.json",
    }
)
# In this order where the user names none: 4 bits keep the file small, 8 bits are what every repository has.
DEFAULT_TAGS = ("Q4_K_M", "Q8_0")

_OPENVINO_SUFFIXES = frozenset({".xml", ".json", ".jinja"})
_ENCODER_FILES = ("tokenizer.json", "config.json")
_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_TAG = re.compile(
    r"(?:^|[-._/])(?P<tag>(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|MXFP4(?:_MOE)?|BF16|F16|F32))\.gguf$", re.IGNORECASE
)
_PROJECTOR = "mmproj"
# What the graphs of other kinds of model are called.
_OTHER_GRAPHS = {
    "openvino_language_model.xml": "a vision-language model",
    "openvino_encoder_model.xml": "a model of encoder and decoder (speech or translation)",
    "openvino_decoder_model.xml": "a model of encoder and decoder (speech or translation)",
    "openvino_transformer.xml": "an image generation model",
    "openvino_unet_model.xml": "an image generation model",
}


@dataclass(frozen=True, slots=True)
class Selection:
    """The files to fetch, and the conversion that they need."""

    format: SourceFormat
    files: tuple[RemoteFile, ...]


def select(listing: Listing, tag: str | None = None) -> Selection:
    """Choose the files of a repository. Raises SourceRejected with the reason and a command that helps."""
    top = {file.path: file for file in listing.files if "/" not in file.path}
    ggufs = [file for file in listing.files if file.path.lower().endswith(".gguf")]
    if tag is not None or (ggufs and MODEL_FILE not in top):
        return Selection(SourceFormat.GGUF, (_choose_gguf(listing, ggufs, tag),))
    if (wanted := files_of_task(listing.name, listing.architectures, top)) is not None:
        return Selection(SourceFormat.TASK, tuple(f for f in listing.files if f.path in wanted | CONFIG_FILES))
    if any(name.startswith("openvino_") and name.endswith(".xml") for name in top):
        return _openvino(listing, top)
    if SAFETENSORS_FILE in top and "modules.json" in top:
        needed = {SAFETENSORS_FILE, "tokenizer.json", *CONFIG_FILES}
        return Selection(SourceFormat.SAFETENSORS, tuple(f for f in listing.files if f.path in needed))
    raise _unusable(listing, top)


def quantization_of(path: str) -> str | None:
    """The quantization that the name of a GGUF file ends in, in capital letters."""
    found = _TAG.search(path)
    return found["tag"].upper() if found else None


def _openvino(listing: Listing, top: dict[str, RemoteFile]) -> Selection:
    if MODEL_FILE not in top:
        kinds = [kind for name, kind in _OTHER_GRAPHS.items() if name in top] or ["a kind of model"]
        raise SourceRejected(
            f"{listing.name} holds {kinds[0]} ({', '.join(sorted(n for n in top if n.endswith('.xml')))}), which this "
            f"node does not serve: text generation and embedding models have one {MODEL_FILE}"
        )
    needed = GENERATION_FILES if "openvino_detokenizer.xml" in top else (MODEL_FILE, WEIGHTS_FILE, *_ENCODER_FILES)
    if missing := [name for name in needed if name not in top]:
        raise SourceRejected(
            f"{listing.name} lacks {', '.join(missing)}, so it cannot be loaded as it is. Export the original model "
            f"instead: {export_command('ORG/ORIGINAL-MODEL', 'model')}"
        )
    wanted = tuple(
        file
        for file in listing.files
        if file.path in CONFIG_FILES
        or ("/" not in file.path and PurePosixPath(file.path).suffix in _OPENVINO_SUFFIXES)
        or (file.path in top and file.path.startswith("openvino_") and file.path.endswith(".bin"))
    )
    return Selection(SourceFormat.OPENVINO, wanted)


def _choose_gguf(listing: Listing, ggufs: list[RemoteFile], tag: str | None) -> RemoteFile:
    whole = [file for file in ggufs if _PROJECTOR not in file.path.lower() and not _SPLIT.search(file.path)]
    tags = sorted({found for file in whole if (found := quantization_of(file.path))})
    for wanted in (tag,) if tag else DEFAULT_TAGS:
        for file in whole:
            if wanted.upper() == quantization_of(file.path) or file.path in {wanted, f"{wanted}.gguf"}:
                return file
    if tag is None and len(whole) == 1:
        return whole[0]
    if not whole:
        split = " in one piece (split files cannot be read; there are some)" if ggufs else ""
        raise SourceRejected(f"{listing.name} holds no GGUF file{split}; leave the quantization out of the name")
    wanted = f"has no {tag}" if tag else f"has neither {' nor '.join(DEFAULT_TAGS)}"
    raise SourceRejected(
        f"{listing.name} {wanted}; it has {', '.join(tags) or 'files of other names'}: add one as :NAME"
    )


def _unusable(listing: Listing, top: dict[str, RemoteFile]) -> SourceRejected:
    weights = [n for n in top if n.endswith((".safetensors", ".bin", ".pt", ".pth", ".onnx", ".h5", ".msgpack"))]
    if not weights:
        return SourceRejected(f"{listing.name} holds no model: no OpenVINO, GGUF or safetensors file at its top")
    name = listing.name.rpartition("/")[2].lower()
    encoder = "modules.json" in top
    return SourceRejected(
        f"{listing.name} holds weights ({min(weights)}{' …' if len(weights) > 1 else ''}) in a form that cannot "
        f"be converted here: OpenVINO directories, GGUF files and BERT encoders in {SAFETENSORS_FILE} can. Look for a "
        f"repository of the same model that ends in -ov or -GGUF, or make one: "
        f"{export_command(listing.name, name, encoder=encoder)}"
    )
