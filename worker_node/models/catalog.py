"""Which models exist, where their files come from, and under which names they are known."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources
from typing import Self

import msgspec

from worker_node.core.errors import ConfigurationError
from worker_node.models.directory import GenerationCanary


class Quantization(StrEnum):
    """How weights are stored.

    A conversion makes `f32` (encoders) and the symmetric integers; `int4_int8` has int4 where fidelity allows, int8
    elsewhere, and `int4_int8_cw` the same with one scale a row (channel-wise), which NPUs run faster. Models are
    published in the others. `npu_rules` says which an NPU takes.
    """

    F32 = "f32"
    F16 = "f16"
    INT8_SYM = "int8_sym"
    INT4_SYM = "int4_sym"
    INT4_INT8 = "int4_int8"
    INT4_INT8_CW = "int4_int8_cw"
    INT4_ASYM = "int4_asym"
    NF4 = "nf4"


# What a conversion of a GGUF file can make.
CONVERTED_FORMS = (
    Quantization.INT8_SYM,
    Quantization.INT4_SYM,
    Quantization.INT4_INT8,
    Quantization.INT4_INT8_CW,
)


class SourceFormat(StrEnum):
    """What the published files are; `task`: a task recognises and converts them."""

    SAFETENSORS = "safetensors"
    GGUF = "gguf"
    OPENVINO = "openvino"
    TASK = "task"


class SourceFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file inside a package, and its name in the directory that is converted."""

    path: str
    name: str
    sha256: str


class PackageSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="package"):
    """A Python package that holds the files; `size` is that of its wheel, in bytes."""

    name: str
    version: str
    size: int
    files: tuple[SourceFile, ...]

    def __str__(self) -> str:
        return f"package {self.name}=={self.version}"


class HubReference(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="hub"):
    """A repository of a model hub; `tag` selects one of its GGUF files by quantization or file name.

    Nothing holds hashes of these: each file is verified against what the hub itself declares for it.
    """

    repo: str
    revision: str = "main"
    tag: str | None = None

    def __str__(self) -> str:
        return f"hub {self.repo}@{self.revision}" + (f":{self.tag}" if self.tag else "")

    @property
    def model_id(self) -> str:
        """The model's directory in the store, unless the user chooses another name."""
        name = self.repo.rpartition("/")[2]
        return as_id(f"{name}-{self.tag}" if self.tag else name)

    @property
    def alias(self) -> str:
        """The name under which the installed model is found, however it was spelled."""
        revision = "" if self.revision == "main" else f"@{self.revision}"
        return normalise_name(self.repo + revision + (f":{self.tag}" if self.tag else ""))


# int4 has scales beside it, and embeddings in int8: 0.6.
_BYTES_A_PARAMETER = {Quantization.F32: 4.0, Quantization.F16: 2.0}


class CatalogEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model; `context_limit` counts tokens, `family` names its chat and tool-call format.

    `prompts` and `matryoshka` count where the model's files declare none. `run_here` says what of it was run in this
    project. `config` are the values of `config.json` that identify it, `weights` known sha256 of `openvino_model.bin`.
    """

    id: str
    kind: str
    licence: str
    family: str
    format: SourceFormat
    source: PackageSource | HubReference
    context_limit: int
    quantization: Quantization
    embedded: bool = False
    aliases: tuple[str, ...] = ()
    dimensions: int | None = None
    parameters: float | None = None
    canary: GenerationCanary | None = None
    max_prompt_len: int | None = None
    prompts: dict[str, str] = {}
    matryoshka: tuple[int, ...] = ()
    run_here: str = "nothing"
    config: dict[str, int | str] = {}
    weights: tuple[str, ...] = ()

    @property
    def estimated_download(self) -> int | None:
        """About how many bytes a hub's files have; None where nothing says how large the model is."""
        if self.parameters is None:
            return None
        return int(self.parameters * 1e9 * _BYTES_A_PARAMETER.get(self.quantization, 0.6))

    def describes(self, config: Mapping[str, object]) -> bool:
        """Whether a model with this `config.json` has the entry's architecture and sizes."""
        return bool(self.config) and all(config.get(key) == value for key, value in self.config.items())


class _CatalogFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: tuple[CatalogEntry, ...]


_NOT_OF_AN_ID = re.compile(r"[^a-z0-9._-]+")


def normalise_name(name: str) -> str:
    """The form in which names are compared: lower case, without Ollama's `:latest`."""
    return name.strip().lower().removesuffix(":latest")


def as_id(name: str) -> str:
    return _NOT_OF_AN_ID.sub("-", name.lower()).strip("-._") or "model"


@dataclass(frozen=True)
class Catalog:
    """All known models, found by id or alias."""

    entries: tuple[CatalogEntry, ...]

    @classmethod
    @functools.cache
    def load(cls) -> Self:
        """The catalog of the package, read once. Raises ConfigurationError when it is damaged."""
        text = resources.files(__package__).joinpath("catalog.toml").read_text(encoding="utf-8")
        return cls.parse(text)

    @classmethod
    def parse(cls, text: str) -> Self:
        try:
            return cls(msgspec.toml.decode(text, type=_CatalogFile).model)
        except msgspec.DecodeError as error:
            raise ConfigurationError(f"catalog.toml: {error}") from error

    def find(self, name: str) -> CatalogEntry | None:
        wanted = normalise_name(name)
        for entry in self.entries:
            if wanted in {normalise_name(known) for known in (entry.id, *entry.aliases)}:
                return entry
        return None

    def suggest(self, name: str, among: Collection[str] | None = None) -> str:
        """`; did you mean …?` with models of `among` (ids; None: the catalog) with such a name; empty for none."""
        wanted = normalise_name(name)
        stem = wanted.partition(":")[0]
        entries = [entry for entry in self.entries if among is None or entry.id in among]
        names = {normalise_name(known): entry.id for entry in entries for known in (entry.id, *entry.aliases)}
        names |= {normalise_name(other): other for other in among or ()}
        found = [model for model in names.values() if len(stem) > 2 and stem in model]
        near = found or [names[known] for known in difflib.get_close_matches(wanted, names, n=4)]
        return f"; did you mean {', '.join(list(dict.fromkeys(near))[:4])}?" if near else ""
