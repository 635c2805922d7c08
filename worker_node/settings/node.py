"""The settings of the node itself: the top level of the file, `NPU_NODE_*` in the environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from worker_node.models.catalog import normalise_name
from worker_node.models.store import default_store_root
from worker_node.settings.hosts import is_host_name, is_loopback, is_origin
from worker_node.settings.model import ModelSettings

EMBEDDED_MODELS = ("all-minilm-l6-v2", "smollm2-135m-instruct")


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
            if not is_host_name(name):
                raise ValueError(
                    f"{name!r} is no host name: write npu.example, *.example for all below it, or * for all"
                )
        return value

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            if origin != "*" and not is_origin(origin):
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


def _reason(error: OSError | UnicodeDecodeError) -> str:
    """Why a file cannot be read; never a part of what is in it."""
    return error.strerror or "it cannot be opened" if isinstance(error, OSError) else "it is not UTF-8"
