"""The settings of one model, `[[models]]` of the file, with the options of its engines as they declared them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    PrivateAttr,
    ValidationError,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from worker_node.core.errors import ConfigurationError
from worker_node.core.types import Device, ModelKind
from worker_node.engines.options import Declared, Option, Options, declarations, declare, options_of

# Properties of the NPU that are settings here: they are moved there while the settings are read.
SETTING_OF: Mapping[str, str] = {
    "CACHE_DIR": "compile_cache",
    "GENERATE_HINT": "generate_hint",
    "MAX_PROMPT_LEN": "max_prompt_len",
    "MIN_RESPONSE_LEN": "min_response_len",
    "NPUW_LLM_ENABLE_PREFIX_CACHING": "enable_prefix_caching",
    "NPUW_LLM_GENERATE_ATTENTION_HINT": "generate_attention_hint",
    "NPUW_LLM_PREFILL_ATTENTION_HINT": "prefill_attention_hint",
    "NPUW_LLM_PREFILL_CHUNK_SIZE": "prefill_chunk_size",
    "NPUW_LLM_PREFIX_CACHING_MAX_NUM_BLOCKS": "prefix_cache_max_num_blocks",
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


def known_options() -> dict[str, Declared]:
    """Every option by the names that are taken for it."""
    found: dict[str, Declared] = {}
    for owner in declarations():
        for declared in options_of(owner).values():
            found |= dict.fromkeys((declared.name, *declared.option.also), declared)
    return found


def _validated(values: Any) -> dict[str, Any]:
    """The values of known options by their own names; None counts as not given. Raises ValidationError."""
    known, names = known_options(), dict[str, str]()
    for name in values:
        own = known[name].name
        if own in names:
            wrong = custom_error("twice", (name,), f"{own} is given twice, under two names")
            raise ValidationError.from_exception_data("options", [wrong], hide_input=True)
        names[own] = name
    given = {name: value for name, value in values.items() if value is not None}
    checked = _model_of(declarations()).model_validate(given)
    return {own: getattr(checked, own) for own, name in names.items() if name in given}


@functools.cache
def _model_of(owners: tuple[type[Options], ...]) -> type[BaseModel]:
    fields: dict[str, Any] = {}
    for owner in owners:
        for name, declared in options_of(owner).items():
            aliases = AliasChoices(name, *declared.option.also)
            fields[name] = (declared.annotation, Field(default=None, validation_alias=aliases))
    return create_model("Options", __config__=ConfigDict(hide_input_in_errors=True, protected_namespaces=()), **fields)


def custom_error(kind: str, path: tuple[str | int, ...], message: str) -> InitErrorDetails:
    """A problem at `path` for `ValidationError.from_exception_data`, with this message as it stands."""
    return InitErrorDetails(type=PydanticCustomError(kind, "{message}", {"message": message}), loc=path, input=None)


class ModelSettings(BaseModel):  # noqa: PLW1641  (options is a dictionary)
    """A model to serve, with the options of its engines (`options`), which are keys of the same table.

    An option that the engine of a device has no use for is reported at start-up; one that no engine for this kind of
    model has is refused.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

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
        "breaks it (docs/npu-facts.md); load it although a newer OpenVINO wrote it",
    )
    compile_cache: Path | None = Field(
        default=None, description="where what is compiled for it is kept; default: the node's"
    )
    options: Annotated[Mapping[str, Any], PlainValidator(_validated)] = {}

    _origin: str = PrivateAttr(default="")

    def examined_options(self) -> dict[str, Any]:
        known = known_options()
        return {name: value for name, value in self.options.items() if known[name].option.examined}

    def of(self, owner: type[O]) -> O:
        return owner(**{name: value for name, value in self.options.items() if name in options_of(owner)})

    def error(self, key: str, message: str) -> ConfigurationError:
        """The error that the value of a key cannot be used, with its file and path."""
        place = f"{self._origin}.{key}: " if self._origin else ""
        return ConfigurationError(f"{place}model {self.name}: {message}")

    def note_origin(self, origin: str) -> None:
        self._origin = origin

    def __eq__(self, other: object) -> bool:
        """Where settings come from makes no difference to the model."""
        return isinstance(other, ModelSettings) and dict(self) == dict(other)

    @model_validator(mode="before")
    @classmethod
    def _with_options(cls, data: Any) -> Any:
        """Keys that are declared options go to `options`."""
        if not isinstance(data, Mapping):
            return data
        if "options" in data:
            wrong = custom_error("extra_forbidden", ("options",), "unknown key")
            raise ValidationError.from_exception_data(cls.__name__, [wrong], hide_input=True)
        known, data = known_options(), _with_tables(data)
        core = {key: value for key, value in data.items() if key not in known}
        if "name" not in core and core.get("path"):
            core["name"] = Path(core["path"]).name.lower()
        return core | {"options": {key: value for key, value in data.items() if key in known}}

    @field_validator("placements")
    @classmethod
    def _devices_once(cls, value: tuple[PlacementSettings, ...] | None) -> tuple[PlacementSettings, ...] | None:
        devices = [place.device for place in value or ()]
        if len(set(devices)) != len(devices):
            raise ValueError("a device is named twice")
        return value


def _with_tables(given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a model with a table for each placement, and the NPU's properties that are settings among the keys.

    `plugin_config` may also be beside one placement, as OpenVINO Model Server has it.
    """
    found, placements = dict(given), given.get("placements")
    if not isinstance(placements, list | tuple):
        return found
    found["placements"] = tables = [{"device": each} if isinstance(each, str) else each for each in placements]
    if len(tables) == 1 and isinstance(tables[0], dict) and "plugin_config" in found:
        tables[0] = {"plugin_config": found.pop("plugin_config"), **tables[0]}

    for index, table in enumerate(tables):
        config = table.get("plugin_config") if isinstance(table, dict) and table.get("device") == Device.NPU else None
        if not isinstance(config, dict):
            continue
        tables[index] = table | {"plugin_config": {name: config[name] for name in config if name not in SETTING_OF}}
        for native in sorted(config.keys() & SETTING_OF.keys()):
            ours, value = SETTING_OF[native], config[native]
            if str(found.setdefault(ours, value)) != str(value):
                text = f"is {value} and {ours} of the model is {found[ours]}; both mean the same: remove one"
                wrong = custom_error("twice", ("placements", index, "plugin_config", native), text)
                raise ValidationError.from_exception_data("placements", [wrong], hide_input=True)
    return found
