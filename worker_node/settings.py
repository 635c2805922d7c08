"""Every setting of a node: defaults, then a TOML file, then `NPU_NODE_*` in the environment, then flags."""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from worker_node.domain import Device
from worker_node.models.catalog import normalise_name
from worker_node.models.store import default_store_root

# Properties of the NPU that follow from settings with names of their own, or that would let another device take over.
NAMED_PROPERTIES = frozenset(
    {
        "CACHE_DIR",
        "GENERATE_HINT",
        "MAX_PROMPT_LEN",
        "MIN_RESPONSE_LEN",
        "NPUW_DEVICES",
        "NPUW_LLM_PREFILL_CHUNK_SIZE",
        "PREFILL_HINT",
    }
)
_HOST_NAME = re.compile(r"\*|(?:\*\.)?[A-Za-z0-9_-][A-Za-z0-9._-]*|[0-9A-Fa-f:.]+")
_ORIGIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/?#\s]+")
EMBEDDED_MODELS = ("all-minilm-l6-v2", "smollm2-135m-instruct")


class PlacementSettings(BaseModel):
    """One device for a model, with the properties that only this device takes.

    `load` None is eager for a model's first placement and lazy (loaded when first needed) for the others.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: Device
    load: Literal["eager", "lazy"] | None = None
    plugin_config: dict[str, Any] = {}

    @model_validator(mode="after")
    def _nothing_behind_our_back(self) -> PlacementSettings:
        taken = sorted(NAMED_PROPERTIES & self.plugin_config.keys()) if self.device is Device.NPU else []
        if taken:
            raise ValueError(f"plugin_config may not hold {', '.join(taken)}: the node has settings for these")
        return self


class ModelSettings(BaseModel):
    """A model to serve; None is the engine's default. Lengths are in tokens.

    `placements` None stands for the devices that there are, NPU before GPU before CPU. What the engine of a device
    cannot use is reported at start-up; what no engine for this kind of model can use is refused. `aliases` are further
    names for it in requests, for tools that cannot be told to ask for another model.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    aliases: tuple[Annotated[str, Field(min_length=1, max_length=128)], ...] = ()
    placements: Annotated[tuple[PlacementSettings, ...], Field(min_length=1)] | None = None
    max_outstanding: int | None = Field(default=None, gt=0)
    idle_unload_s: float | None = Field(default=None, gt=0)
    compile_cache: Path | None = None
    # embedding
    precision: str | None = None
    streams: int | None = Field(default=None, ge=0, le=64)
    max_batch_tokens: int | None = Field(default=None, gt=0)
    # embedding on the NPU: static shapes
    npu_buckets: Annotated[tuple[Annotated[int, Field(ge=8)], ...], Field(min_length=1)] | None = None
    npu_batch_size: int | None = Field(default=None, ge=1, le=64)
    # generation
    max_tokens_limit: int | None = Field(default=None, gt=0)
    best_of_limit: int | None = Field(default=None, ge=1)
    # generation, continuous batching
    kv_cache_precision: Literal["u8", "i8", "f16", "bf16", "f32"] | None = None
    max_num_batched_tokens: int | None = Field(default=None, gt=0)
    max_num_seqs: int | None = Field(default=None, gt=0)
    cache_size_gb: int | None = Field(default=None, ge=0)
    dynamic_split_fuse: bool | None = None
    enable_prefix_caching: bool | None = None
    # generation on the NPU: static shapes
    max_prompt_len: int | None = Field(default=None, gt=0)
    min_response_len: int | None = Field(default=None, gt=0)
    prefill_hint: Literal["DYNAMIC", "STATIC"] | None = None
    generate_hint: Literal["FAST_COMPILE", "BEST_PERF"] | None = None
    prefill_chunk_size: int | None = Field(default=None, ge=16)

    @field_validator("npu_buckets")
    @classmethod
    def _ascending(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        return None if value is None else tuple(sorted(set(value)))

    @field_validator("prefill_chunk_size")
    @classmethod
    def _power_of_two(cls, value: int | None) -> int | None:
        if value is not None and value & (value - 1):
            raise ValueError("the NPU takes only powers of two")
        return value

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


def default_compile_cache() -> Path:
    """`npu-node/compiled` in `$XDG_CACHE_HOME`, else in `~/.cache`."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "npu-node" / "compiled"


class NodeSettings(BaseSettings):
    """The node. Times are seconds, sizes bytes.

    `npu_sysfs` is where the counters of the NPU are read; None is the kernel's place, or the stand-in of an emulated
    NPU. A prompt of more than `npu_token_limit` tokens does not go to the NPU, whatever its engine could hold: above
    about 2,000 tokens it is known to answer garbage without an error. A request that requires the NPU is refused unless
    the busy counter moved; `npu_require_proof` refuses it also where the counter cannot be read. `ollama_port` (11435
    by custom) is a second port for tools that take the host and port of an Ollama server; everything is served on both.
    `api_keys_file` holds more
    `api_keys`, one a line; it is how a service manager hands them over (systemd's LoadCredential). A node without keys
    answers only to requests for its own names: loopback, the bind address, `allowed_hosts`; pages of other sites may
    send requests, and read replies, if `cors_origins` names them. `unknown_fields` says whether fields of OpenAI's and
    Ollama's dialect that have no effect here are ignored and listed in the reply, or refused. Of /v1/responses,
    `stored_responses` are kept in memory for later turns, `stored_response_bytes` together, each for
    `stored_response_s`; with 0 none are. `tracing` sends spans of inference requests to the collector that the standard
    `OTEL_*` environment names (docs/monitoring.md).
    An engine process whose memory has grown by `engine_memory_growth` since it was ready is replaced (None: an eighth
    of the machine's memory, 1 to 8 GiB); docs/schemas.md says why and how.
    """

    model_config = SettingsConfigDict(
        env_prefix="NPU_NODE_",
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
    )

    host: str = "127.0.0.1"
    port: int = Field(default=8081, ge=0, le=65535)
    ollama_port: int | None = Field(default=None, ge=0, le=65535)
    api_keys: Annotated[tuple[SecretStr, ...], NoDecode] = ()
    api_keys_file: Path | None = None
    allow_unauthenticated: bool = False
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = ()
    cors_origins: Annotated[tuple[str, ...], NoDecode] = ()
    model_store: Path = Field(default_factory=default_store_root)
    models: tuple[ModelSettings, ...] = tuple(ModelSettings(name=name) for name in EMBEDDED_MODELS)
    compile_cache: Path = Field(default_factory=default_compile_cache)
    npu_sysfs: Path | None = None
    npu_emulation: bool = False
    npu_token_limit: int = Field(default=1800, gt=0)
    npu_require_proof: bool = False

    tracing: bool = False

    unknown_fields: Literal["ignore", "reject"] = "ignore"
    max_body_bytes: int = Field(default=8 * 1024 * 1024, gt=0)
    max_texts: int = Field(default=2048, gt=0)
    embedding_cache: int = Field(default=1000, ge=0, le=1_000_000)
    stored_responses: int = Field(default=1000, ge=0, le=100_000)
    stored_response_bytes: int = Field(default=64 * 1024 * 1024, gt=0)
    stored_response_s: float = Field(default=3600.0, gt=0)
    max_connections: int = Field(default=1024, gt=0)
    header_timeout_s: float = Field(default=5.0, gt=0)
    body_timeout_s: float = Field(default=10.0, gt=0)
    keepalive_timeout_s: float = Field(default=75.0, gt=0)
    request_timeout_s: float = Field(default=180.0, gt=0)
    drain_timeout_s: float = Field(default=25.0, ge=0, le=25.0)
    load_timeout_s: float = Field(default=600.0, gt=0)
    watchdog_s: float = Field(default=30.0, gt=0)
    run_timeout_s: float = Field(default=180.0, gt=0)
    canary_interval_s: float = Field(default=300.0, gt=0)
    quarantine_s: float = Field(default=300.0, gt=0)
    crash_limit: int = Field(default=3, ge=1)
    crash_window_s: float = Field(default=600.0, gt=0)
    engine_memory_growth: int | None = Field(default=None, gt=0)

    @field_validator("allowed_hosts")
    @classmethod
    def _host_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if _HOST_NAME.fullmatch(name) is None:
                raise ValueError(
                    f"{name!r} is no host name: write npu.example, *.example for all below it, or * for all"
                )
        return value

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            if origin != "*" and _ORIGIN.fullmatch(origin) is None:
                raise ValueError(
                    f"{origin!r} is no origin: write https://app.example (scheme, host, port) or * for all"
                )
        return value

    @field_validator("api_keys", "allowed_hosts", "cors_origins", mode="before")
    @classmethod
    def _keys_by_comma(cls, value: Any) -> Any:
        """`NPU_NODE_API_KEYS=a,b` is two keys."""
        return [key.strip() for key in value.split(",") if key.strip()] if isinstance(value, str) else value

    @model_validator(mode="before")
    @classmethod
    def _keys_of_file(cls, data: Any) -> Any:
        given = data.get("api_keys_file") if isinstance(data, dict) else None
        if given is None:
            return data
        try:
            lines = [line.strip() for line in Path(given).expanduser().read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"api_keys_file {given} cannot be read: {_reason(error)}") from None
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise ValueError(f"api_keys_file {given} holds no key: write one a line")
        return data | {"api_keys": [*cls._keys_by_comma(data.get("api_keys", ())), *keys]}

    @field_validator("models")
    @classmethod
    def _models_once(cls, value: tuple[ModelSettings, ...]) -> tuple[ModelSettings, ...]:
        names = [model.name for model in value]
        if len(set(names)) != len(names):
            raise ValueError("a model is named twice")
        aliases = [normalise_name(alias) for model in value for alias in model.aliases]
        if len(set(aliases)) != len(aliases):
            raise ValueError("an alias is given twice")
        return value

    @model_validator(mode="after")
    def _never_open_by_accident(self) -> NodeSettings:
        if not (self.api_keys or self.allow_unauthenticated or is_loopback(self.host)):
            raise ValueError(
                f"binding {self.host} would serve anyone who can reach it: set NPU_NODE_API_KEYS or _API_KEYS_FILE, or "
                "NPU_NODE_ALLOW_UNAUTHENTICATED=true if something else guards the port"
            )
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003  (pydantic-settings calls by position)
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags before environment before file."""
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)

    @classmethod
    def load(cls, config: Path | None = None, **flags: Any) -> NodeSettings:
        """Read the settings, with `config` as the TOML file. Raises pydantic.ValidationError, OSError."""

        class FromFile(cls):  # type: ignore[valid-type, misc]
            model_config = SettingsConfigDict(toml_file=config)

        if config is not None and not config.is_file():
            raise FileNotFoundError(f"configuration file {config} does not exist")
        settings: NodeSettings = FromFile(**flags)
        return settings


def _reason(error: OSError | UnicodeDecodeError) -> str:
    """Why a file cannot be read; never a part of what is in it."""
    return error.strerror or "it cannot be opened" if isinstance(error, OSError) else "it is not UTF-8"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a socket that is bound to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
