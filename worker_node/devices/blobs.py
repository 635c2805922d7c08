"""Compiling for the NPU, in engine processes: the properties for it, and the blobs that `npu-node compile` makes.

A directory holds one blob for each compiled shape, and `blobs.json`. A blob fits one model and the settings that it was
compiled with, and the NPUs and drivers that OpenVINO says: where it does not say, those with the versions that made it.
The engine that loads a blob checks all of this first, then the hash of each file, so that the native code that reads
blobs is given only what was written here. That protects against mistakes and damage, not against attackers who can
write to the directory: a blob is code.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import openvino as ov

from worker_node.devices.npu import ACCEL_DEVICES, EMULATED_NAME, NPU_ON_CPU, find_npu

log = logging.getLogger(__name__)

NPU = "NPU"
RECORD_FILE = "blobs.json"
VERSION = 3
# The form without the weights where the compiler can leave them out: they are read from the model's own file.
# OpenVINO's cache looks at the mode, an export at the other.
SMALL = {"CACHE_MODE": "OPTIMIZE_SIZE"}
WEIGHTLESS = SMALL | {"ENABLE_WEIGHTLESS": "YES"}
# The compiler of OpenVINO 2026.4 does not end where it must leave the weights out for these (docs/npu-facts.md).
_WITH_WEIGHTS = frozenset({"3720"})
# What decides whether a device can run a blob, where it does not say so itself.
_VERSIONS = frozenset({"architecture", "driver", "compiler", "openvino"})
_UNKNOWN_ELSEWHERE = frozenset({"driver", "compiler"})
# A record is some hundred bytes; a larger file is not one.
_RECORD_LIMIT = 1 << 20


class BlobRejected(Exception):
    """A blob cannot be used here; the message names its directory and the reason."""


class BlobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `blobs.json`: all that the blobs depend on, and the hash of each file in hex.

    `origin` has the hash of the model's files, versions (a version may be unknown) and the options that are compiled
    in; `model` is for people. `requirements` says by blob what it needs of a device, in OpenVINO's words. Blobs are
    `proven` when the machine that compiled them has run them.
    """

    version: int
    model: str
    origin: dict[str, Any]
    files: dict[str, str]
    requirements: dict[str, str] = {}
    proven: bool = True


def write_record(
    directory: Path,
    model: str,
    origin: Mapping[str, Any],
    names: Iterable[str],
    requirements: Mapping[str, str] | None = None,
    *,
    proven: bool = True,
) -> None:
    """Describe the blobs `names` that were written to `directory`. Raises OSError."""
    files = {name: sha256(directory / name) for name in names}
    needs = dict(requirements or {})
    record = BlobRecord(
        version=VERSION, model=model, origin=dict(origin), files=files, requirements=needs, proven=proven
    )
    (directory / RECORD_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")


def read_record(directory: Path) -> BlobRecord:
    """Read `blobs.json`. Raises BlobRejected."""
    path = directory / RECORD_FILE
    try:
        if not path.is_file():
            raise BlobRejected(f"{directory} has no {RECORD_FILE}; make it with: npu-node compile")
        with path.open("rb") as file:
            record = msgspec.json.decode(file.read(_RECORD_LIMIT), type=BlobRecord)
    except (OSError, ValueError, msgspec.DecodeError) as error:
        raise BlobRejected(f"{path} cannot be read ({error}); compile again") from None
    if record.version != VERSION:
        raise BlobRejected(f"{path} has version {record.version}, known is {VERSION}; compile again")
    return record


def check_blobs(
    directory: Path, record: BlobRecord, here: Mapping[str, Any], names: Iterable[str], *, runs: bool | None = None
) -> None:
    """Raise BlobRejected unless blobs are unchanged and compiled for `here`; `runs` is what the device says."""
    made = record.origin
    if runs is False:
        needs = ", ".join(sorted(set(record.requirements.values())))
        raise BlobRejected(
            f"the blobs in {directory} ({record.model}) need another NPU or driver ({needs}); compile again here"
        )
    allowed = _VERSIONS if runs else frozenset[str]() if record.proven else _UNKNOWN_ELSEWHERE
    differences = [
        f"{name} was {_shown(made.get(name))}, and is {_shown(here.get(name))} here"
        for name in {**here, **made}
        if name not in allowed and made.get(name) != here.get(name)
    ]
    if differences:
        raise BlobRejected(
            f"the blobs in {directory} were compiled for something else ({record.model}): {'; '.join(differences)}"
        )
    for name in names:
        path, known = directory / name, record.files.get(name)
        if known is None or not path.is_file():
            raise BlobRejected(f"{path} is missing; compile again")
        if sha256(path) != known:
            raise BlobRejected(f"{path} is damaged: its hash is not the one that was written; compile again")


def _shown(value: Any) -> str:
    return "not set or unknown" if value is None else str(value)[:40]


def sha256(*paths: Path) -> str:
    """The hash of files one after another, in hex. Raises OSError."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class ModelBlobs:
    """The blobs `names` of the model in `directory`.

    `settings` are the engine's options that are compiled in, `genai` the version of GenAI where it is used. They are
    compiled for a `platform`, such as 4000, where that is another machine's.
    """

    model_id: str
    directory: Path
    names: Sequence[str]
    settings: Mapping[str, Any]
    emulated: bool
    genai: str | None = None
    platform: str | None = None

    @property
    def weights(self) -> Path:
        return self.directory / "openvino_model.bin"

    def written(self, core: ov.Core, target: Path, requirements: Mapping[str, str] | None = None) -> None:
        proven = self.platform is None
        write_record(target, self.model_id, self._origin(core), self.names, requirements, proven=proven)

    def checked(self, core: ov.Core, source: Path) -> dict[str, Any]:
        """Return the properties to import the blobs in `source` with. Raises BlobRejected."""
        record = read_record(source)
        runs = None if self.emulated else _runs_here(core, [record.requirements.get(name) for name in self.names])
        check_blobs(source, record, self._origin(core), self.names, runs=runs)
        return {"WEIGHTS_PATH": str(self.weights)} | (NPU_ON_CPU if self.emulated else {})

    def _origin(self, core: ov.Core) -> dict[str, Any]:
        def known(name: str) -> str | None:
            return None if self.emulated else read_property(core, name)

        origin = {
            "model_sha256": sha256(self.directory / "openvino_model.xml", self.weights),
            "device": f"{NPU}-emulated" if self.emulated else NPU,
            "architecture": self.platform or known("DEVICE_ARCHITECTURE"),
            "driver": None if self.platform else known("NPU_DRIVER_VERSION"),
            "compiler": known("NPU_COMPILER_VERSION"),
            "openvino": ov.get_version(),
            "genai": self.genai,
            **self.settings,
        }
        # As it is read back: without tuples.
        return dict(msgspec.json.decode(msgspec.json.encode(origin)))


def _runs_here(core: ov.Core, requirements: Iterable[str | None]) -> bool | None:
    """Whether the NPU says that it runs blobs with these requirements; None where it does not say."""
    answers = set()
    for text in requirements:
        if text is None:
            return None
        try:
            answer = core.get_property(NPU, "COMPATIBILITY_CHECK", {"RUNTIME_REQUIREMENTS": text})
        except (RuntimeError, TypeError):  # older drivers cannot tell
            return None
        answers.add(str(answer).rpartition(".")[2])
    if "UNSUPPORTED" in answers:
        return False
    return True if answers == {"SUPPORTED"} else None


def compile_encoder(core: ov.Core, model: ov.Model, config: Mapping[str, Any], *, emulated: bool) -> ov.CompiledModel:
    """Compile one static shape for the NPU, without its weights where the compiler can leave them out."""
    platform = config.get("NPU_PLATFORM") or read_property(core, "DEVICE_ARCHITECTURE")
    if not emulated and platform is not None and platform not in _WITH_WEIGHTS:
        try:
            return core.compile_model(model, NPU, WEIGHTLESS | dict(config))
        except RuntimeError as error:  # a driver's compiler may not know how
            log.info("compiling with the weights: %s", brief(error))
    return core.compile_model(model, NPU, dict(config))


def requirements_of(compiled: ov.CompiledModel) -> str | None:
    """What a compiled model needs of an NPU and its driver; None where OpenVINO does not say."""
    try:
        return str(compiled.get_property("RUNTIME_REQUIREMENTS"))
    except RuntimeError:
        return None


def unusable(source: Path, error: Exception) -> BlobRejected:
    return BlobRejected(f"the blobs in {source} cannot be loaded ({brief(error)}); compile again")


def import_encoder(core: ov.Core, path: Path, properties: Mapping[str, Any], shape: Sequence[int]) -> ov.CompiledModel:
    """Load one compiled shape of an encoder. Raises BlobRejected when it cannot be loaded, or has another shape."""
    try:
        compiled = core.import_model(path.read_bytes(), NPU, dict(properties))
        shapes = {port.any_name: list(port.shape) for port in compiled.inputs}
    # A damaged name in a blob fails in Python, with another error than OpenVINO's own.
    except (RuntimeError, ValueError, MemoryError) as error:
        raise unusable(path, error) from None
    if any(found != list(shape) for found in shapes.values()):
        raise BlobRejected(f"{path} takes inputs of the shapes {shapes}, and should take {list(shape)}; compile again")
    return compiled


def npu_properties(
    *, emulated: bool, cache_dir: str | None, plugin_config: Mapping[str, Any], **named: Any
) -> dict[str, Any]:
    """Merge the named properties (None: left to OpenVINO) with the user's own; what emulation needs comes last."""
    properties = {key: value for key, value in named.items() if value is not None}
    if cache_dir is not None:
        properties["CACHE_DIR"] = cache_dir
    properties |= plugin_config
    return properties | NPU_ON_CPU if emulated else properties


def describe_npu(core: ov.Core, *, emulated: bool) -> tuple[str, str | None]:
    """The device's full name and the version of its driver, each as far as it can be read."""
    if emulated:
        return EMULATED_NAME, None
    return str(read_property(core, "FULL_DEVICE_NAME") or NPU), read_property(core, "NPU_DRIVER_VERSION")


def require_npu(core: ov.Core, plugin_config: Mapping[str, Any], *, emulated: bool) -> None:
    """Raise RuntimeError without an NPU; for `NPU_PLATFORM`, another machine's, without a compiler."""
    if "NPU_PLATFORM" in plugin_config and read_property(core, "NPU_COMPILER_VERSION") is None:
        raise RuntimeError(
            "OpenVINO has no NPU compiler on this machine: its wheel for Windows has one, and on Linux the NPU's "
            "driver; compile there, or on the machine with the NPU"
        )
    if not emulated and NPU not in core.available_devices and "NPU_PLATFORM" not in plugin_config:
        raise RuntimeError(
            f"OpenVINO sees no NPU on this machine, only {', '.join(core.available_devices)}{_refused()}; "
            "npu-node doctor says what it lacks; to do without an NPU set NPU_NODE_NPU_EMULATION=1"
        )


def _refused() -> str:
    """That the driver has no free context, which OpenVINO does not say; empty if it has one."""
    device = ACCEL_DEVICES / find_npu().parent.name
    try:
        os.close(os.open(device, os.O_RDWR))
    except OSError as error:
        if error.errno == errno.EMFILE:
            return f" ({error})"

    return ""


def brief(error: Exception) -> str:
    """The last line of what OpenVINO says, without its source positions."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:200] if lines else type(error).__name__


def read_property(core: ov.Core, name: str) -> str | None:
    try:
        return str(core.get_property(NPU, name))
    except RuntimeError:
        return None
