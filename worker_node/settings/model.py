"""The settings of one model, `[[models]]` of the file, with the options of its engines as they declared them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from worker_node.core.errors import ConfigurationError
from worker_node.core.types import Device, ModelKind
from worker_node.engines.options import (
    Declared,
    Option,
    Options,
    declarations,
    declare,
    options_of,
)

# Properties of the NPU that are settings here: they are moved there while the settings are read.
SETTING_OF: Mapping[str, str] = {
    "CACHE_DIR": "compile_cache",
    "GENERATE_HINT": "generate_hint",
    "MAX_PROMPT_LEN": "max_prompt_len",
    "MIN_RESPONSE_LEN": "min_response_len",
    "NPUW_LLM_PREFILL_CHUNK_SIZE": "prefill_chunk_size",
    "PREFILL_HINT": "prefill_hint",
}

O = TypeVar("O", bound=Options)  # noqa: E741


@declare
@dataclass(frozen=True, kw_only=True)
class VectorOptions(Options):
    """How token vectors become the vector of a text, for a directory (`path`) that does not say it."""

    title: ClassVar[str] = "Embedding: a directory (`path`) whose files do not specify it"
    task: ClassVar[str] = ModelKind.EMBEDDING

    pooling: Annotated[
        Literal["mean", "cls", "last"] | None,
        Option(
            "the mean of the token vectors, the first one, or the last one (Qwen3-Embedding)",
            default="as the directory's modules.json says",
        ),
    ] = None
    normalize: Annotated[
        bool | None,
        Option("scale vectors to length 1", default="as modules.json says; true with pooling", also=("normalise",)),
    ] = None


class PlacementSettings(BaseModel):
    """One device for a model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: Device = Field(description="NPU, GPU or CPU")
    load: Literal["eager", "lazy"] | None = Field(
        default=None,
        description="load with the node, or when a request needs it; default: eager for the first placement of a "
        "model, lazy for the others",
    )
    plugin_config: dict[str, Any] = Field(default={}, description="properties for OpenVINO's plugin of the device")

    @field_validator("plugin_config")
    @classmethod
    def _no_silent_fallback(cls, value: dict[str, Any]) -> dict[str, Any]:
        if "NPUW_DEVICES" in value:
            raise ValueError("NPUW_DEVICES would let another device take over in silence; name it in placements")
        return value


class ModelSettings(BaseModel):  # noqa: PLW1641  (options is a dictionary)
    """A model to serve, with the options of its engines (`options`), which are keys of the same table.

    An option that the engine of a device has no use for is reported at start-up; one that no engine for this kind of
    model has is refused.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(
        description="the model's name, as `npu-node list` lists it; with a path any name; default: that of the "
        "directory"
    )
    path: Path | None = Field(
        default=None, description="a directory that is served where it is; nothing is written to it (docs/models.md)"
    )
    aliases: tuple[Annotated[str, Field(min_length=1, max_length=128)], ...] = Field(
        default=(), description="further names for it in requests, for tools that ask for one model only"
    )
    placements: Annotated[tuple[PlacementSettings, ...], Field(min_length=1)] | None = Field(
        default=None,
        description='devices in the order of preference, as names (["NPU", "CPU"]) or tables; default: those that '
        "there are, NPU before GPU before CPU",
    )
    max_outstanding: int | None = Field(
        default=None,
        gt=0,
        description="requests (generation) or texts (embedding) queued or running; default: by engine",
    )
    idle_unload_s: float | None = Field(
        default=None, gt=0, description="seconds without a request after which it is unloaded; default: never"
    )
    allow_known_bad: bool = Field(
        default=False,
        description="place it on a real NPU although it is known not to work there, or its weights are of a form that "
        "breaks it (docs/npu-facts.md)",
    )
    compile_cache: Path | None = Field(
        default=None, description="where what is compiled for it is kept; default: the node's"
    )
    options: Mapping[str, Any] = {}

    _origin: str = PrivateAttr(default="")

    def of(self, owner: type[O]) -> O:
        """The options of a declaration; what is left open has its default."""
        return owner(**select(owner, self.options))

    def error(self, key: str, message: str) -> ConfigurationError:
        """The error that the value of a key cannot be used, with its file and path."""
        place = f"{self._origin}.{key}: " if self._origin else ""
        return ConfigurationError(f"{place}model {self.name}: {message}")

    def note_origin(self, origin: str) -> None:
        """Note the file and table that the settings come from, for errors."""
        self._origin = origin

    def __eq__(self, other: object) -> bool:
        """Where settings come from makes no difference to the model."""
        return isinstance(other, ModelSettings) and dict(self) == dict(other)

    @model_validator(mode="wrap")
    @classmethod
    def _with_options(cls, data: Any, handler: ModelWrapValidatorHandler[ModelSettings]) -> ModelSettings:
        """Keys that are declared options go to `options`; all problems are raised together."""
        if not isinstance(data, Mapping):
            return handler(data)
        known = known_options()
        wrong = [custom_error("extra_forbidden", ("options",), "unknown key")] if "options" in data else []
        data = _named_as_here(data, wrong)
        core = {key: value for key, value in data.items() if key not in known and key != "options"}
        if "name" not in core and core.get("path"):
            core["name"] = Path(core["path"]).name.lower()
        try:
            core["options"] = validated({key: value for key, value in data.items() if key in known})
        except ValidationError as error:
            wrong += _repeated(error)
        try:
            model = handler(core)
        except ValidationError as error:
            wrong = _repeated(error) + wrong
        if wrong:
            raise ValidationError.from_exception_data(cls.__name__, wrong, hide_input=True)
        return model

    @field_validator("placements")
    @classmethod
    def _devices_once(cls, value: tuple[PlacementSettings, ...] | None) -> tuple[PlacementSettings, ...] | None:
        devices = [place.device for place in value or ()]
        if len(set(devices)) != len(devices):
            raise ValueError("a device is named twice")
        return value

    @field_validator("placements", mode="before")
    @classmethod
    def _devices_by_name(cls, value: Any) -> Any:
        """`placements = ["NPU", "CPU"]` is short for tables that only name the device."""
        if isinstance(value, list | tuple):
            return tuple({"device": item} if isinstance(item, str) else item for item in value)
        return value


def _named_as_here(table: Mapping[str, Any], wrong: list[InitErrorDetails]) -> dict[str, Any]:
    """The table with the NPU's properties in `plugin_config` moved to the settings of the same meaning.

    OpenVINO Model Server has `plugin_config` beside one device; here it moves to the placement of that device.
    """
    found, places = dict(table), table.get("placements")
    if not isinstance(places, list | tuple):
        return found
    tables = [{"device": place} if isinstance(place, str) else place for place in places]
    if len(tables) == 1 and isinstance(tables[0], dict) and "plugin_config" in found:
        tables[0] = {"plugin_config": found.pop("plugin_config"), **tables[0]}
    for index, place in enumerate(tables):
        config = place.get("plugin_config") if isinstance(place, dict) and place.get("device") == Device.NPU else None
        if not isinstance(config, dict):
            continue
        for native in sorted(config.keys() & SETTING_OF.keys()):
            ours = SETTING_OF[native]
            if str(found.setdefault(ours, config[native])) != str(config[native]):
                clash = f"is {config[native]} and {ours} of the model is {found[ours]}; both mean the same: remove one"
                wrong.append(custom_error("twice", ("placements", index, "plugin_config", native), clash))
        left = {name: value for name, value in config.items() if name not in SETTING_OF}
        tables[index] = place | {"plugin_config": left}
    return found | {"placements": tables}


def known_options() -> dict[str, Declared]:
    """Every option by the names that are taken for it."""
    found: dict[str, Declared] = {}
    for owner in declarations():
        for declared in options_of(owner).values():
            found |= dict.fromkeys((declared.name, *declared.option.also), declared)
    return found


def validated(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of known options by their own names; None counts as not given.

    Raises ValidationError with every wrong value.
    """
    known, found, wrong = known_options(), dict[str, Any](), list[InitErrorDetails]()
    for name, value in values.items():
        declared = known[name]
        if declared.name in found:
            wrong.append(custom_error("twice", (name,), f"{declared.name} is given twice, under two names"))
        elif value is not None:
            try:
                found[declared.name] = _adapter(declared.annotation).validate_python(value)
            except ValidationError as error:
                wrong += _repeated(error, name)
    if wrong:
        raise ValidationError.from_exception_data("options", wrong, hide_input=True)
    return found


def select(owner: type[O], values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the validated values that are options of `owner`."""
    options = options_of(owner)
    return {name: value for name, value in values.items() if name in options}


@functools.cache
def _adapter(annotation: Any) -> TypeAdapter[Any]:
    return TypeAdapter(annotation, config=ConfigDict(hide_input_in_errors=True))


def custom_error(kind: str, path: tuple[str | int, ...], message: str) -> InitErrorDetails:
    """A problem at `path` for `ValidationError.from_exception_data`, with this message as it stands."""
    return InitErrorDetails(type=PydanticCustomError(kind, "{message}", {"message": message}), loc=path, input=None)


def _repeated(error: ValidationError, *path: str | int) -> list[InitErrorDetails]:
    """The problems of an error that was raised, below `path`, to be raised with others."""
    details = error.errors(include_input=False, include_url=False)
    return [custom_error(detail["type"], (*path, *detail["loc"]), detail["msg"]) for detail in details]
