"""Declarations of options: a frozen dataclass beside the code that uses them, one annotated field for each option.

    @declare
    @dataclass(frozen=True, kw_only=True)
    class StatefulOptions(EngineOptions):
        title: ClassVar[str] = "Generation on the NPU"
        task: ClassVar[str] = ModelKind.GENERATION
        devices: ClassVar[frozenset[Device]] = frozenset({Device.NPU})

        engine: Literal["generation_stateful"] = "generation_stateful"
        min_response_len: Annotated[int, Gt(0), Option("tokens that an answer has room for")] = 128

From this follow the key of node.toml, its validation, its documentation and the note of an engine that has no use for
it. Engine processes import these declarations, so that pydantic, which validates them at the edge, is not needed here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar, TypeVar, get_type_hints

import msgspec

from worker_node.core.types import Device
from worker_node.engines.protocol import EngineSpec
from worker_node.registry import import_options


@dataclass(frozen=True, slots=True)
class Option:
    """Marks a field as an option of node.toml; fields without it are set by the node.

    `text` says what it does, with its unit. `default` is what applies where that depends on the model or the device.
    `also` are the names of the same option, with the same unit, in other servers; they are accepted. A certification
    holds whatever it is set to, unless it is `examined`.
    """

    text: str
    default: str | None = None
    also: tuple[str, ...] = ()
    examined: bool = True


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of all models of one task."""

    title: ClassVar[str]
    task: ClassVar[str]


@dataclass(frozen=True, kw_only=True)
class EngineOptions(Options):
    """Options of one engine; `engine`, a Literal in each, tells them apart, and `runner` is its class."""

    devices: ClassVar[frozenset[Device]]
    runner: ClassVar[str]

    engine: str
    cache_dir: str | None = None
    plugin_config: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class NpuOptions(EngineOptions):
    """Options that the node sets on the NPU; the engine advances the `busy_counter` itself if `stand_in`."""

    busy_counter: str | None = None
    stand_in: bool = False


@dataclass(frozen=True, slots=True)
class Declared:
    """One option as it was declared; `annotation` is its type with the bounds of its values."""

    name: str
    option: Option
    annotation: Any
    default: Any


_DECLARED: dict[type[Options], Mapping[str, Declared]] = {}

O = TypeVar("O", bound=Options)  # noqa: E741
E = TypeVar("E", bound=EngineOptions)


def declare(owner: type[O]) -> type[O]:
    """Make the options of a class known. Raises TypeError when a name means something else in another class."""
    hints = get_type_hints(owner, include_extras=True)
    found = {}
    for field in dataclasses.fields(owner):
        marks = [mark for mark in getattr(hints[field.name], "__metadata__", ()) if isinstance(mark, Option)]
        if marks:
            found[field.name] = Declared(field.name, marks[0], hints[field.name], field.default)
    for other, options in _DECLARED.items():
        for name in found.keys() & options.keys():
            if found[name].annotation != options[name].annotation:
                raise TypeError(f"the option {name} of {owner.__name__} has another type in {other.__name__}")
    _DECLARED[owner] = found
    return owner


def declarations() -> tuple[type[Options], ...]:
    import_options()
    return tuple(_DECLARED)


def options_of(owner: type[Options]) -> Mapping[str, Declared]:
    return _DECLARED[owner]


def engines() -> tuple[type[EngineOptions], ...]:
    return tuple(owner for owner in declarations() if issubclass(owner, EngineOptions))


def engine_for(task: str, device: Device) -> type[EngineOptions]:
    """The engine that runs models of a task on a device. Raises LookupError when there is none."""
    for owner in engines():
        if owner.task == task and device in owner.devices:
            return owner
    raise LookupError(f"no engine runs {task} models on {device}")


def options_in(spec: EngineSpec, owner: type[E]) -> E:
    """The options of an engine, in its process. Raises TypeError for one that `owner` does not declare."""
    if unknown := spec.options.keys() - {field.name for field in dataclasses.fields(owner)}:
        raise TypeError(f"{owner.__name__} must declare {', '.join(sorted(unknown))}, which {spec.runner} is given")
    return msgspec.convert(spec.options, owner)


# Options of engines that can load what was compiled ahead of time.

# They say where something is, not what is compiled.
_NOT_COMPILED_IN = frozenset({"engine", "cache_dir", "blobs", "export_blobs", "platform", "busy_counter", "stand_in"})


@dataclass(frozen=True, kw_only=True)
class BlobOptions(NpuOptions):
    """The engine loads the blobs in `blobs`, or writes what it compiles to `export_blobs`.

    With a `platform` it compiles for that NPU, of another machine, and runs nothing. Only the node sets those two.
    """

    blobs: Annotated[
        str | None,
        Option(
            "directory that `npu-node compile` made; the model is loaded from there instead of being compiled, and is "
            "rejected if it was made for another model, driver, OpenVINO or other settings",
            default="compile when it is loaded",
        ),
    ] = None
    export_blobs: str | None = None
    platform: str | None = None

    @property
    def compiler_config(self) -> dict[str, Any]:
        """`plugin_config`, with the NPU that is compiled for."""
        return self.plugin_config | ({} if self.platform is None else {"NPU_PLATFORM": self.platform})

    def compiled_in(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name not in _NOT_COMPILED_IN}
