"""What the node knows about a model in the store: `npu-node.json` in the model's own directory.

The manifest is written last, when everything that it names is there; a directory without one holds no
installed model."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from worker_node.core.errors import ConfigurationError
from worker_node.core.types import ModelKind
from worker_node.models.canary import Canary, GenerationCanary, read_embedding_canary

MANIFEST_FILE = "npu-node.json"
MODEL_FILE = "openvino_model.xml"
WEIGHTS_FILE = "openvino_model.bin"
MANIFEST_VERSION = 1


class Fidelity(msgspec.Struct, frozen=True):
    """How near the compressed weights are to the published ones, over `tokens` teacher-forced predictions.

    `kl` is the mean Kullback-Leibler divergence per token in nats, from the distribution of the exactly
    dequantised weights to that of the stored ones; `top1` the share of predictions whose likeliest token is
    the same.
    """

    kl: float
    top1: float
    tokens: int


class VectorFidelity(msgspec.Struct, frozen=True):
    """How near the vectors of an encoder with compressed weights are to those of the published weights.

    The mean and the least cosine between the two vectors of a text, both computed in float32, over `texts` texts.
    """

    mean_cosine: float
    min_cosine: float
    texts: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of `npu-node.json`; see `InstalledModel` for the meaning of the fields."""

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
    fidelity: Fidelity | None = None
    max_prompt_len: int | None = None
    aliases: tuple[str, ...] = ()
    prompts: dict[str, str] = {}
    matryoshka: tuple[int, ...] = ()
    vector_fidelity: VectorFidelity | None = None


@dataclass(frozen=True, slots=True)
class InstalledModel:
    """A model that is in the store, complete and ready to be loaded.

    `context_limit` counts tokens. `dimensions` and `space` belong to embedding models: two vectors may be
    compared only if their `space` is equal. `source_sha256` maps the published files to their hashes, `files`
    what was made of them to their sizes in bytes. `canary` is None when nothing is known that the model
    should answer. `digest` (hex sha256) changes with the model, `installed_at` is Unix time. `aliases` are further
    names that it answers to, in lower case: those of the source that it was pulled from. `prompts` are the texts that
    an embedding model puts before a `query` or a `document`; to the `matryoshka` sizes, in dimensions, its vectors may
    be cut.
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
    fidelity: Fidelity | None = None
    max_prompt_len: int | None = None
    digest: str = ""
    installed_at: float = 0.0
    aliases: tuple[str, ...] = ()
    prompts: dict[str, str] = field(default_factory=dict)
    matryoshka: tuple[int, ...] = ()
    vector_fidelity: VectorFidelity | None = None

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(self.files.values())


def sizes(directory: Path) -> dict[str, int]:
    """Every file of a model directory with its size in bytes, the manifest itself excepted."""
    return {
        str(path.relative_to(directory)): path.stat().st_size
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != MANIFEST_FILE
    }


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest, which declares the directory to be a model."""
    encoded = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
    (directory / MANIFEST_FILE).write_bytes(encoded + b"\n")


class ManifestFacts(msgspec.Struct, frozen=True):
    """What a manifest says of a model whose other files may be damaged."""

    kind: str | None = None
    aliases: tuple[str, ...] = ()


def read_facts(directory: Path) -> ManifestFacts:
    """What the manifest of a directory says; nothing where there is none, or a damaged one."""
    try:
        return msgspec.json.decode((directory / MANIFEST_FILE).read_bytes(), type=ManifestFacts)
    except (OSError, UnicodeDecodeError, msgspec.DecodeError):
        return ManifestFacts()


def read_model(directory: Path) -> InstalledModel:
    """Read a model directory that has a manifest.

    Raises ConfigurationError, with the file's name, when the manifest is missing, damaged or written by a
    newer version, or when a file that it names is missing or has another size.
    """
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
        canary = read_embedding_canary(directory)
    return InstalledModel(
        id=manifest.id,
        kind=manifest.kind,
        path=directory,
        context_limit=manifest.context_limit,
        quantization=manifest.quantization,
        family=manifest.family,
        dimensions=manifest.dimensions,
        space=manifest.space,
        canary=canary,
        licence=manifest.licence,
        source=manifest.source,
        source_sha256=manifest.source_sha256,
        files=manifest.files,
        fidelity=manifest.fidelity,
        max_prompt_len=manifest.max_prompt_len,
        digest=hashlib.sha256(encoded).hexdigest(),
        installed_at=installed_at,
        aliases=manifest.aliases,
        prompts=manifest.prompts,
        matryoshka=manifest.matryoshka,
        vector_fidelity=manifest.vector_fidelity,
    )


# Whether the weights of OpenVINO files are all there: OpenVINO's own error for a truncated file does not name it.

_CONSTANT = re.compile(rb'offset="(\d+)" size="(\d+)"')


def check_weights(directory: Path) -> None:
    """Raise ConfigurationError, with the file's name, when a graph needs more bytes than its weights have.

    A directory with a manifest is not looked at: the manifest has the sizes, and they are checked with it.
    """
    if (directory / MANIFEST_FILE).is_file():
        return
    for graph in sorted(directory.glob("openvino*.xml")):
        ends = (int(offset) + int(size) for offset, size in _CONSTANT.findall(graph.read_bytes()))
        weights, needed = graph.with_suffix(".bin"), max(ends, default=0)
        found = weights.stat().st_size if weights.is_file() else 0
        if found < needed:
            raise ConfigurationError(
                f"{weights}: {found} bytes, and {graph.name} needs {needed}; the file is truncated or missing: copy it "
                "again"
            )
