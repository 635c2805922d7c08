"""Blobs in an engine process: compile and write them for the NPU, real or emulated, or check those that are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import openvino as ov

from worker_node.devices.blobs import BlobOrigin, BlobRejected, check_blobs, sha256, write_record
from worker_node.devices.emulation import NPU_ON_CPU
from worker_node.devices.npu_properties import NPU, brief, read_property

# The form without the weights where the compiler can leave them out: they are read from the model's own file.
SMALL = {"CACHE_MODE": "OPTIMIZE_SIZE"}


@dataclass(frozen=True, slots=True)
class ModelBlobs:
    """The blobs `names` of the model in `directory`.

    `settings` are the engine's options that are compiled in, `genai` the version of GenAI where it is used.
    """

    model_id: str
    directory: Path
    names: Sequence[str]
    settings: Mapping[str, Any]
    emulated: bool
    genai: str | None = None

    @property
    def weights(self) -> Path:
        """The file of the model's weights, which blobs without weights need."""
        return self.directory / "openvino_model.bin"

    def written(self, core: ov.Core, target: Path) -> None:
        """Describe the blobs that were written to `target`. Raises OSError."""
        write_record(target, self._origin(core), self.names)

    def checked(self, core: ov.Core, source: Path) -> dict[str, Any]:
        """Return the properties to import the blobs in `source` with. Raises BlobRejected."""
        check_blobs(source, self._origin(core), self.names)
        return {"WEIGHTS_PATH": str(self.weights)} | (NPU_ON_CPU if self.emulated else {})

    def _origin(self, core: ov.Core) -> BlobOrigin:
        def known(name: str) -> str | None:
            return None if self.emulated else read_property(core, name)

        return BlobOrigin(
            model=self.model_id,
            model_sha256=sha256(self.directory / "openvino_model.xml", self.weights),
            device=f"{NPU}-emulated" if self.emulated else NPU,
            architecture=known("DEVICE_ARCHITECTURE"),
            driver=known("NPU_DRIVER_VERSION"),
            compiler=known("NPU_COMPILER_VERSION"),
            openvino=ov.get_version(),
            genai=self.genai,
            # As it is read back: without tuples.
            settings=msgspec.json.decode(msgspec.json.encode(self.settings)),
        )


def unusable(source: Path, error: Exception) -> BlobRejected:
    """What the failed import of checked blobs is reported as."""
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
