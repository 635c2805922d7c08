"""A model's directory: its manifest (`npu-node.json`), its canary, and what OpenVINO models without a manifest say.

The manifest is written last, when everything that it names is there; in the store, a directory without one holds no
model. Directories elsewhere may have none: then the facts are those of `config.json`.
"""

from __future__ import annotations

import codecs
import hashlib
import html
import re
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from worker_node.core.errors import ConfigurationError
from worker_node.core.operating_system import WINDOWS
from worker_node.core.types import ModelKind
from worker_node.devices.npu import version_in
from worker_node.models.disk import storage_problem

CANARY_FILE = "canary.json"

# Short, so that the examination takes milliseconds; different in script, length and meaning, so that a device
# which ignores its input, its mask or the tail of a text cannot pass.
CANARY_TEXTS = (
    "A cat sits on the mat.",
    "Quarterly revenue rose by 12% to €4.2 billion.",
    "東京は日本の首都です。",
    "The quick brown fox jumps over the lazy dog while seven wizards quietly box up the last of the jugs.",
    "ok",
)
# bf16 on the CPU stays above 0.9999 and f16 on an NPU above 0.999; garbage is below 0.5.
MIN_COSINE = 0.995


@dataclass(frozen=True, slots=True)
class EmbeddingCanary:
    """Texts and their unit vectors (float32 values, one row a text); each cosine must reach `min_cosine`."""

    texts: tuple[str, ...]
    vectors: tuple[tuple[float, ...], ...]
    min_cosine: float = MIN_COSINE

    def __post_init__(self) -> None:
        if not self.texts or len(self.texts) != len(self.vectors):
            raise ValueError(f"{len(self.texts)} texts but {len(self.vectors)} vectors")


@dataclass(frozen=True, slots=True)
class GenerationCanary:
    """A user message; the greedy answer must contain each of `expected`, upper or lower case alike."""

    prompt: str
    expected: tuple[str, ...]
    max_new_tokens: int = 24


Canary = EmbeddingCanary | GenerationCanary
_T = TypeVar("_T")


def write_canary(directory: Path, canary: object) -> None:
    (directory / CANARY_FILE).write_bytes(msgspec.json.encode(canary))


def read_canary(directory: Path, kind: type[_T]) -> _T:
    return read_json(directory / CANARY_FILE, kind, "; remove the model and pull it again")


def read_json(path: Path, kind: type[_T], remedy: str = "") -> _T:
    """A JSON file of a model. Raises ConfigurationError, naming the file, when it is missing or damaged."""
    try:
        return msgspec.json.decode(path.read_bytes().removeprefix(codecs.BOM_UTF8), type=kind)
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise ConfigurationError(f"{path}: not readable ({error}){remedy}") from error


def read_config(path: Path) -> dict[str, Any]:
    return read_json(path, dict[str, Any])


def peek_config(path: Path) -> dict[str, Any]:
    """As `read_config`; nothing where the file is missing or damaged."""
    try:
        return read_config(path)
    except ConfigurationError:
        return {}


MANIFEST_FILE = "npu-node.json"
MODEL_FILE = "openvino_model.xml"
WEIGHTS_FILE = "openvino_model.bin"
# Of encoders; generation models have it as a graph.
TOKENIZER_FILE = "tokenizer.json"
MANIFEST_VERSION = 1


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """`npu-node.json`; see `InstalledModel`. The `space` holds for this `content` of encoder and tokenizer."""

    version: int
    id: str
    kind: str
    family: str
    context_limit: int
    quantization: str
    licence: str
    source: str
    source_sha256: dict[str, str]
    files: dict[str, int]
    made_with: dict[str, str]
    dimensions: int | None = None
    space: str | None = None
    canary: GenerationCanary | None = None
    max_prompt_len: int | None = None
    aliases: tuple[str, ...] = ()
    prompts: dict[str, str] = {}
    matryoshka: tuple[int, ...] = ()
    content: str | None = None


@dataclass(frozen=True, slots=True)
class InstalledModel:
    """A model that is complete and ready to be loaded.

    `context_limit` counts tokens. Vectors may be compared only if their `space` is equal; they may be cut to the
    `matryoshka` sizes. `prompts` stand before a `query` or a `document`. `source_sha256` has the hashes of the
    published files, `files` the sizes in bytes of what was made of them. `digest` (hex) changes with the model.
    `aliases` are names of its source, in lower case. `installed_at` is Unix time.
    """

    id: str
    kind: str
    path: Path
    context_limit: int
    quantization: str
    family: str
    dimensions: int | None = None
    space: str | None = None
    canary: Canary | None = None
    licence: str = "unknown"
    source: str = "unknown"
    source_sha256: dict[str, str] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    max_prompt_len: int | None = None
    digest: str = ""
    installed_at: float = 0.0
    aliases: tuple[str, ...] = ()
    prompts: dict[str, str] = field(default_factory=dict)
    matryoshka: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return sum(self.files.values())

    def describe(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "source": self.source,
            "size": self.size,
            "context": self.context_limit,
            "details": {
                "digest": self.digest,
                "family": self.family,
                "quantization": self.quantization,
                "licence": self.licence,
                "dimensions": self.dimensions,
                "space": self.space,
                "prompts": self.prompts or None,
                "matryoshka": list(self.matryoshka) or None,
            },
        }


def sizes(directory: Path) -> dict[str, int]:
    """Every file of a model directory with its size in bytes, the manifest itself excepted."""
    return {
        path.relative_to(directory).as_posix(): path.stat().st_size
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != MANIFEST_FILE
    }


# OpenVINO numbers the layers that a conversion makes: the same conversion gives them other names in each run. The size
# of groups is a note that no device reads, unless it is -1.
_NOT_CONTENT = re.compile(rb' name="[^"]*"|\n\s*<group_size value="\d+" />')


def content_hash(directory: Path, *more: str) -> str:
    """SHA-256 of a model's graphs, weights and `more` files: equal for copies, and for equal conversions elsewhere."""
    paths = sorted(path for path in directory.iterdir() if path.suffix in {".xml", ".bin"} or path.name in more)
    found = [(path, path.stat()) for path in paths]
    return _content_hash(tuple((path, it.st_size, it.st_mtime_ns, it.st_ctime_ns, it.st_ino) for path, it in found))


@lru_cache(maxsize=64)
def _content_hash(files: tuple[tuple[Path, int, int, int, int], ...]) -> str:
    digest = hashlib.sha256()
    for path, *_ in files:
        digest.update(path.name.encode() + b"\0")
        if path.suffix == ".xml":
            digest.update(hashlib.sha256(_NOT_CONTENT.sub(b"", path.read_bytes())).digest())
            continue
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def write_manifest(directory: Path, manifest: Manifest) -> None:
    encoded = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
    (directory / MANIFEST_FILE).write_bytes(encoded + b"\n")


class ManifestFacts(msgspec.Struct, frozen=True):
    """What a manifest says of a model whose other files may be damaged."""

    kind: str | None = None
    aliases: tuple[str, ...] = ()


def read_facts(directory: Path) -> ManifestFacts:
    """What the manifest of a directory says; nothing where there is none, or a damaged one."""
    try:
        return read_json(directory / MANIFEST_FILE, ManifestFacts)
    except ConfigurationError:
        return ManifestFacts()


def read_model(directory: Path) -> InstalledModel:
    """Read a directory with a manifest. Raises ConfigurationError, naming the file that is damaged or missing."""
    path = directory / MANIFEST_FILE
    remedy = f"remove the model (rm -r {directory}) and pull it again"
    try:
        encoded, installed_at = path.read_bytes(), path.stat().st_mtime
        manifest = msgspec.json.decode(encoded, type=Manifest)
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise ConfigurationError(f"{path}: not a readable manifest ({error}); {remedy}") from error
    if manifest.version != MANIFEST_VERSION:
        raise ConfigurationError(f"{path}: manifest version {manifest.version}, known is {MANIFEST_VERSION}; {remedy}")

    for name, size in manifest.files.items():
        file = directory / name
        if "\0" in name or not file.is_file():
            raise ConfigurationError(f"{file}: missing; {remedy}")
        if (found := file.stat().st_size) != size:
            raise ConfigurationError(f"{file}: {found} bytes, the manifest says {size}; {remedy}")

    canary: Canary | None = manifest.canary
    if manifest.kind == ModelKind.EMBEDDING:
        canary = read_canary(directory, EmbeddingCanary)
    known = {name: getattr(manifest, name) for name in manifest.__struct_fields__}
    for name in ("version", "made_with", "content"):
        del known[name]
    digest = hashlib.sha256(encoded).hexdigest()
    space = _current_space(directory, manifest, installed_at)
    return InstalledModel(
        **known | {"canary": canary, "space": space}, path=directory, digest=digest, installed_at=installed_at
    )


def _current_space(directory: Path, manifest: Manifest, installed_at: float) -> str | None:
    """The manifest's space, or another one if the files changed; they are hashed if one is newer than the manifest.

    On Windows they are always hashed: an older file that is copied over one keeps its time of writing, and Windows
    tells no time of the change.
    """
    if manifest.space is None or manifest.content is None:
        return manifest.space
    touched = [max(it.st_mtime, it.st_ctime) for name in manifest.files if (it := (directory / name).stat())]
    if not WINDOWS and max(touched, default=0.0) <= installed_at:
        return manifest.space
    content = content_hash(directory, TOKENIZER_FILE)
    if content == manifest.content:
        return manifest.space
    return hashlib.sha256(f"{manifest.space} {content}".encode()).hexdigest()[: len(manifest.space)]


TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER_GRAPH = "openvino_tokenizer.xml"
_TEMPLATE_FILES = ("chat_template.jinja", "template.jinja")
_IN_GRAPH = re.compile(r'<chat_template value="([^"]*)"')


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A template in Jinja, and the file that holds it."""

    text: str
    file: Path


def find_template(directory: Path) -> ChatTemplate | None:
    """The template of its own file, of `tokenizer_config.json` or of the tokenizer. Raises ConfigurationError."""
    for name in _TEMPLATE_FILES:
        if (file := directory / name).is_file() and (text := _text_of(file)).strip():
            return ChatTemplate(text, file)
    if (file := directory / TOKENIZER_CONFIG).is_file():
        given = read_config(file).get("chat_template")
        if isinstance(given, list) and all(isinstance(item, dict) for item in given):
            given = {item.get("name"): item.get("template") for item in given}.get("default", 0)
        if given is not None and not isinstance(given, str):
            raise ConfigurationError(
                f'{file}: chat_template is neither a text nor a list with one that is named "default"'
            )
        if given:
            return ChatTemplate(given, file)
    if (file := directory / TOKENIZER_GRAPH).is_file() and (found := _IN_GRAPH.search(_text_of(file))):
        return ChatTemplate(html.unescape(found[1]), file)
    return None


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file}: not readable ({error})") from error


GENERATION_CONFIG = "generation_config.json"
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=10_000_000)]


class _SamplingFields(msgspec.Struct, omit_defaults=True):
    """The fields of `Sampling` that it may have."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    top_p: _Share | None = None
    top_k: _Count | None = None
    min_p: _Share | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(ge=0.01, le=100)] | None = None
    max_new_tokens: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] | None = None


def sampling_defaults(directory: Path) -> dict[str, Any]:
    """The model's own defaults; a model without `do_sample` is greedy. Raises ConfigurationError."""
    path = directory / GENERATION_CONFIG
    if not path.is_file():
        return {}
    config = read_config(path)
    try:
        found: dict[str, Any] = msgspec.to_builtins(msgspec.convert(config, _SamplingFields))
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{path}: {error}") from error
    if config.get("do_sample") is not True:
        found["temperature"] = 0.0
    elif not found.get("temperature"):
        found["temperature"] = 1.0
    if found.get("top_p") == 0:
        found |= {"top_p": 1.0, "temperature": 0.0}
    return found


TOKENIZER_FILES = (
    "openvino_tokenizer.xml",
    "openvino_tokenizer.bin",
    "openvino_detokenizer.xml",
    "openvino_detokenizer.bin",
)
GENERATION_FILES = (MODEL_FILE, WEIGHTS_FILE, *TOKENIZER_FILES)

# Where the configuration of the language model stands within that of a vision model.
_LANGUAGE = ("text_config", "llm_config", "language_config")
# Optional, but a damaged one would only be found by an engine that cannot load.
_OTHER_CONFIGS = (TOKENIZER_CONFIG, GENERATION_CONFIG)

# Where nncf and the conversions of this project note in a graph how its weights are stored.
_TAIL_BYTES = 1 << 16
_NOTE = re.compile(r'<(\w+) value="([^"]*)"')
# By the converter, and by whatever saved the graph.
_WRITTEN_BY = re.compile(r'(?:<Runtime_version|name="OpenVINO Runtime") value="([^"]*)"')
_RELEASE = re.compile(r"\d+\.\d+")


def has_manifest(path: Path) -> bool:
    """Whether a directory has a manifest. Raises ConfigurationError where this user may not look into it."""
    try:
        return (path / MANIFEST_FILE).exists()
    except OSError as error:
        raise ConfigurationError(storage_problem(error) or f"{path}: not readable ({error})") from error


def read_directory(path: Path) -> InstalledModel:
    """Read a model; one that generates needs no manifest beside `config.json`. Raises ConfigurationError."""
    if has_manifest(path):
        return read_model(path)
    missing = [name for name in GENERATION_FILES if not (path / name).is_file()]
    if missing:
        raise ConfigurationError(
            f"{path}: not a model directory that can be loaded; missing: {', '.join([MANIFEST_FILE, *missing])} "
            "(npu-node pull makes one of GGUF, safetensors and OpenVINO files)"
        )
    try:
        for name in _OTHER_CONFIGS:
            if (path / name).is_file():
                read_config(path / name)
        return describe_export(path, path.resolve().name.lower(), ModelKind.GENERATION, MODEL_FILE)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: not readable ({error})") from error


def describe_export(path: Path, name: str, kind: str, graph: str, limit: int | None = None) -> InstalledModel:
    """The model of a directory in OpenVINO form; `limit` is its context where `config.json` has none."""
    config, template, files = read_config(path / "config.json"), find_template(path), sizes(path)
    changed = (path / graph).stat().st_mtime_ns
    parts = [part for part in (config, *map(config.get, _LANGUAGE)) if isinstance(part, dict)]
    stated = [found for part in parts if isinstance(found := part.get("max_position_embeddings"), int) and found > 0]
    if not (limit or stated):
        raise ConfigurationError(f"{path / 'config.json'}: max_position_embeddings is missing or not a whole number")
    return InstalledModel(
        id=name,
        kind=kind,
        path=path,
        context_limit=limit or stated[0],
        quantization=noted_compression(path / graph).get("mode", "unknown"),
        family=family_of(str(config.get("model_type", "")), template.text if template else ""),
        source=f"directory {path}",
        files=files,
        # Of names, sizes and times: hashing gigabytes of weights at every look would take seconds.
        digest=hashlib.sha256(repr((sorted(files.items()), changed)).encode()).hexdigest(),
        installed_at=changed / 1e9,
    )


# The family of Phi-3 and what is built as it.
PHI = "phi"


def family_of(model_type: str, template: str) -> str:
    """The chat and tool-call format: by the marks in the template, else the architecture's own name."""
    if "<|start_header_id|>" in template:
        return "llama3"
    if "<|im_start|>" in template:
        return "qwen" if model_type.startswith("qwen") else "chatml"
    return PHI if model_type.startswith("phi") else model_type or "base"


def noted_compression(graph: Path) -> dict[str, str]:
    """What the end of a graph notes of its weights (`mode`, `group_size`, `ratio`); nothing where it does not."""
    notes = _notes(graph).partition("<weight_compression>")[2].partition("</weight_compression>")[0]
    return dict(_NOTE.findall(notes))


def _notes(graph: Path) -> str:
    try:
        with graph.open("rb") as stream:
            stream.seek(max(0, graph.stat().st_size - _TAIL_BYTES))
            return stream.read().decode(errors="replace")
    except OSError:
        return ""


def runtime_problem(directory: Path, runtime: str) -> str | None:
    """Why OpenVINO of version `runtime` may crash on a model's graphs: a newer release wrote one; None if none did.

    A release is a year and a number; the third number only corrects it.
    """
    ours = _RELEASE.match(runtime)
    if ours is None:
        return None

    for graph in sorted(directory.glob("*.xml")):
        for wrote in _WRITTEN_BY.findall(_notes(graph)):
            if not version_in(wrote, f">{ours[0]}"):
                continue

            theirs, own = (version.partition("-")[0] for version in (wrote, runtime))
            return f"{graph} was written by OpenVINO {theirs}, and this node runs {own}, which may crash on it"

    return None
