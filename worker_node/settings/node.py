"""The settings of the node itself: the top level of the file, `NPU_NODE_*` in the environment."""

from __future__ import annotations

import errno
import ipaddress
import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, PrivateAttr, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from worker_node.core.environment import cache_home
from worker_node.core.types import Device
from worker_node.engines.watchdog import LOAD_TIMEOUT_S
from worker_node.models.catalog import Catalog, normalise_name
from worker_node.models.store import default_store_root
from worker_node.settings.model import ModelSettings, custom_error

# At least as hard to guess as 16 random letters, and the same in every header, file and shell.
_KEY = re.compile(r"[!-~]{16,}")
# A name or an address, `*.example` for all names below one, or `*` for all.
_HOST_NAME = re.compile(r"\*|(?:\*\.)?[A-Za-z0-9_-][A-Za-z0-9._-]*|[0-9A-Fa-f:.]+")
# Scheme, host and port as browsers send them; the port may be any.
_ORIGIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://(?:\[[0-9A-Fa-f:.]+\]|[^/?#\s*:\[\]]+)(?::(?:[0-9]{1,5}|\*))?")
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*(?:([KMGT])(i?))?B?", re.IGNORECASE | re.ASCII)


def _read_size(value: Any) -> Any:
    """`"2 GB"` and `"1.5 GiB"` as bytes; what is not text stays as it is. Raises ValueError."""
    if not isinstance(value, str | bool):
        return value
    found = _SIZE.fullmatch(str(value).strip())
    if found is None:
        raise ValueError(f'must be a size such as "2 GB", "512 MiB" or 1048576 (bytes), not {str(value)[:40]!r}')
    number, unit, binary = found.groups("")
    power = " KMGT".index(unit.upper() or " ")
    return int(float(number) * (1024 if binary else 1000) ** power)


# In bytes.
Size = Annotated[int, BeforeValidator(_read_size), Field(gt=0, json_schema_extra={"format": "size"})]


@lru_cache(maxsize=64)
def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a socket that is bound to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# Marks the settings that a reload applies; all others need a restart.
RELOADED = "reloaded"

EMBEDDED_MODELS = ("all-minilm-l6-v2", "smollm2-135m-instruct")


def default_compile_cache() -> Path:
    return cache_home() / "npu-node" / "compiled"


class NodeSettings(BaseSettings):
    """The node. Times are seconds, sizes bytes. The descriptions become docs/settings.md: run `make docs`."""

    model_config = SettingsConfigDict(
        env_prefix="NPU_NODE_",
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
        allow_inf_nan=False,
    )

    host: str = Field(
        default="127.0.0.1",
        description="address to bind; another than loopback needs an API key (or allow_unauthenticated)",
    )
    port: int = Field(default=8081, ge=0, le=65535, description="port to bind; 0 takes a free one")
    ollama_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="a second port with the same routes, for tools that take the host and port of an Ollama "
        "server (11435 by custom)",
    )
    announce: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="URLs of gateways (npu-gateway) to which this node announces its address every 5 s",
    )
    announce_key: SecretStr | None = Field(
        default=None, description="this node's key there: npu-gateway nodes enrol NAME"
    )
    announce_url: str | None = Field(
        default=None,
        description="the URL that the node announces; default: the address that the node listens on, or the one from "
        "which this machine reaches the gateway",
    )
    announce_labels: dict[str, str] = Field(
        default={}, description='up to 16 labels that `npu-gateway nodes list` shows: {"site": "berlin"}'
    )
    api_keys: Annotated[tuple[SecretStr, ...], NoDecode, RELOADED] = Field(
        default=(),
        description="API keys of at least 16 characters, printable ASCII without blanks; each request must carry one; "
        "better in a file",
    )
    api_keys_file: Annotated[Path | None, RELOADED] = Field(
        default=None,
        description="a file with further keys, one a line; a service manager hands them over so (systemd's "
        "LoadCredential)",
    )
    allow_unauthenticated: Annotated[bool, RELOADED] = Field(
        default=False,
        description="serve without keys on an address that others reach, because something else guards the port",
    )
    tls_cert: Path | None = Field(
        default=None, description="PEM file of the node's certificate and its chain: the node serves https"
    )
    tls_key: Path | None = Field(default=None, description="PEM file of its key; default: it is in tls_cert")
    tls_client_ca: Path | None = Field(
        default=None, description="PEM file of an authority: only clients with a certificate of it are admitted"
    )
    allowed_hosts: Annotated[tuple[str, ...], NoDecode, RELOADED] = Field(
        default=(), description='further host names of a node without keys: "npu.example", "*.lan", "*"'
    )
    cors_origins: Annotated[tuple[str, ...], NoDecode, RELOADED] = Field(
        default=(), description='sites whose pages may call this node: "https://app.example", "http://localhost:*", "*"'
    )
    model_store: Path = Field(
        default_factory=default_store_root,
        description="directory of the installed models; default: ~/.cache/npu-node/models",
    )
    pull_roots: Annotated[tuple[Path, ...], NoDecode, RELOADED] = Field(
        default=(),
        description="directories of model files that requests may pull by their path; npu-node pull takes any",
    )
    models: Annotated[tuple[ModelSettings, ...], RELOADED] = Field(
        default=tuple(ModelSettings(name=name) for name in EMBEDDED_MODELS),
        description="what to serve: a table [[models]] for each model",
    )
    devices: Annotated[tuple[Device, ...], NoDecode] = Field(
        default=(),
        description="devices for models without placements of their own, in the order of preference; default: all that "
        "there are, NPU before GPU before CPU",
    )
    npu_proxy_names: bool = Field(
        default=False, description="npu-proxy's headers and metrics beside this node's own (docs/coming-from.md)"
    )
    compile_cache: Path = Field(
        default_factory=default_compile_cache,
        description="directory for what was compiled for NPU and GPU, kept between starts; "
        "default: ~/.cache/npu-node/compiled",
    )
    npu_sysfs: Path | None = Field(
        default=None,
        description="directory of the NPU's counters; default: that of the device in /sys/class/accel with "
        "driver intel_vpu",
    )
    energy_sysfs: Path | None = Field(
        default=None,
        description="directory with intel_pmt, powercap and power_supply, which say what answers cost; default: "
        "/sys/class",
    )
    passports: Path | None = Field(
        default=None,
        description="directory of the passports that npu-node certify writes, and of this node's key; default: "
        "`passports` beside the model store",
    )
    trusted_keys: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(), description="public keys of other nodes whose passports count here, in hexadecimal"
    )
    require_certified: bool = Field(
        default=False,
        description="use only placements whose passport says certified or limited, and is of a real device",
    )
    faults: Path | None = Field(
        default=None,
        description="a TOML file of faults that engines have on demand, to test what depends on the node: "
        "docs/certify.md; only with npu_emulation or allow_faults",
    )
    allow_faults: bool = Field(default=False, description="let `faults` strike the engines of real devices, too")
    npu_emulation: bool = Field(
        default=False, description="run the NPU's code path on the CPU, labelled as emulated everywhere"
    )
    npu_token_limit: int | None = Field(
        default=None,
        gt=0,
        description="tokens of the longest prompt that goes to the NPU, whatever its engine holds; default: what a "
        "passport proves, else what is known of the NPU (docs/npu.md), else 1800",
    )
    npu_require_proof: bool = Field(
        default=False, description="refuse requests that require the NPU where its busy counter cannot be read"
    )
    tracing: bool = Field(
        default=False, description="send OpenTelemetry spans of requests to where OTEL_* says (docs/monitoring.md)"
    )
    grafana_url: str | None = Field(
        default=None,
        pattern=r"^https?://[^\s\"'<>]+$",
        description="address of a Grafana with this node's dashboards; the dashboard links to it",
    )
    unknown_fields: Annotated[Literal["ignore", "reject"], RELOADED] = Field(
        default="ignore",
        description="what to do with fields of OpenAI's and Ollama's dialects that have no effect here: ignore "
        "and list them in the reply, or reject",
    )
    sampling_defaults: Literal["model", "greedy"] = Field(
        default="model",
        description="where a request leaves sampling open: the model's generation_config.json (in Ollama's dialect "
        "Ollama's own defaults), or greedy",
    )
    max_body_bytes: Annotated[Size, RELOADED] = Field(
        default=8 * 1024 * 1024, description="bytes of the largest request body"
    )
    max_image_body_bytes: Annotated[Size, RELOADED] = Field(
        default=32 * 1024 * 1024,
        description="the same for requests that may carry images, while a model that reads images is served: one of "
        "20 MB in base64 and some text fit the default",
    )
    max_texts: Annotated[int, RELOADED] = Field(default=2048, gt=0, description="texts in one request")
    embedding_cache: int = Field(
        default=1000, ge=0, le=1_000_000, description="texts whose vectors each model keeps; 0 keeps none"
    )
    max_connections: int = Field(
        default=1024,
        gt=0,
        description="connections with a request; the next gets 429. Idle ones are replaced by new ones",
    )
    header_timeout_s: float = Field(
        default=5.0,
        gt=0,
        description="seconds from the opening of a connection to the end of its first header",
    )
    body_timeout_s: Annotated[float, RELOADED] = Field(
        default=10.0, gt=0, description="seconds of silence within a body"
    )
    keepalive_timeout_s: float = Field(
        default=75.0, gt=0, description="seconds that an idle connection stays open, or takes for its next header"
    )
    request_timeout_s: Annotated[float, RELOADED] = Field(
        default=180.0, gt=0, description="seconds until a whole answer is complete, or a streamed one begins"
    )
    drain_timeout_s: Annotated[float, RELOADED] = Field(
        default=25.0, ge=0, le=25.0, description="seconds that admitted work gets to finish after SIGTERM"
    )
    load_timeout_s: float = Field(
        default=LOAD_TIMEOUT_S,
        gt=0,
        description="seconds that the load of a model may take; a cold compile for an NPU takes minutes",
    )
    watchdog_s: float = Field(
        default=30.0,
        gt=0,
        description="seconds of silence, outside of a long native call, after which an engine is killed and replaced",
    )
    run_timeout_s: float = Field(default=180.0, gt=0, description="seconds that one call into OpenVINO may take")
    canary_interval_s: float = Field(
        default=300.0, gt=0, description="seconds after which an idle engine must answer its known question again"
    )
    quarantine_s: float = Field(
        default=300.0,
        gt=0,
        description="seconds before a placement is tried again after a wrong answer or too many crashes",
    )
    crash_limit: int = Field(default=3, ge=1, description="crashes within crash_window_s that quarantine a placement")
    crash_window_s: float = Field(
        default=600.0, gt=0, description="seconds that a placement must serve for its crashes to be forgotten"
    )
    engine_memory_growth: Size | None = Field(
        default=None,
        description="bytes by which an engine process may grow before it is restarted, once idle; at twice as much "
        "at once (docs/schemas.md); default: an eighth of the machine's memory, 1 to 8 GiB",
    )
    engine_nice: int = Field(
        default=5,
        ge=0,
        le=19,
        description="how much lower than the edge's the priority of engine processes is: on a full machine the edge "
        "does not wait for a core until they pause (docs/performance.md)",
    )
    memory_budget: Annotated[Size | None, RELOADED] = Field(
        default=None,
        description="bytes of memory that all models together may take; a load that does not fit unloads idle models "
        "that the settings do not name; default: 80 % of the host memory that is free at start-up",
    )

    _from_file: bool = PrivateAttr(default=False)

    @property
    def from_file(self) -> bool:
        return self._from_file

    def note_file(self, *, given: bool) -> None:
        self._from_file = given

    @field_validator("allowed_hosts")
    @classmethod
    def _host_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if _HOST_NAME.fullmatch(name) is None:
                raise ValueError(
                    f"{name!r} is not a host name: write npu.example, *.example for all below it, or * for all"
                )
        return value

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            if origin != "*" and _ORIGIN.fullmatch(origin) is None:
                raise ValueError(
                    f"{origin!r} is not an origin: write https://app.example (scheme, host, port), "
                    "http://localhost:* for any port, or * for all"
                )
        return value

    @field_validator("pull_roots")
    @classmethod
    def _roots(cls, value: tuple[Path, ...]) -> tuple[Path, ...]:
        if relative := next((root for root in value if not root.expanduser().is_absolute()), None):
            raise ValueError(f"{str(relative)!r} must be an absolute path")
        return tuple(root.expanduser() for root in value)

    @field_validator(
        "announce",
        "trusted_keys",
        "api_keys",
        "allowed_hosts",
        "cors_origins",
        "pull_roots",
        "devices",
        mode="before",
    )
    @classmethod
    def _list(cls, value: Any) -> Any:
        """`NPU_NODE_API_KEYS=a,b` is two keys, and so is `["a", "b"]`."""
        if not isinstance(value, str):
            return value
        if not value.lstrip().startswith("["):
            return [item.strip() for item in value.split(",") if item.strip()]
        try:
            return json.loads(value)
        except ValueError:
            raise ValueError('must be names with commas between them, or a JSON list such as ["a", "b"]') from None

    @field_validator("trusted_keys")
    @classmethod
    def _public_keys(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(re.fullmatch("[0-9a-f]{64}", key) for key in value):
            raise ValueError("must be public keys of 64 hexadecimal digits, as npu-node passports keys shows them")
        return value

    @field_validator("announce")
    @classmethod
    def _gateways(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for url in value:
            parts = urlsplit(url)
            if parts.scheme not in {"http", "https"} or not parts.hostname or parts.username or parts.query:
                raise ValueError("must be URLs of gateways such as https://gateway.example:8090, without a password")
        return value

    @field_validator("api_keys")
    @classmethod
    def _keys(cls, value: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        for place, key in enumerate(value):
            if not _KEY.fullmatch(key.get_secret_value()):
                raise ValueError(
                    f"API key {place + 1} must have at least 16 characters, printable ASCII without blanks, and has "
                    f"{len(key.get_secret_value())}; make one with: "
                    "python3 -c 'import secrets; print(secrets.token_urlsafe(32))'"
                )
        return value

    @model_validator(mode="before")
    @classmethod
    def _keys_of_file(cls, data: Any) -> Any:
        given = data.get("api_keys_file") if isinstance(data, dict) else None
        if given is None:
            return data
        try:
            lines = [line.strip() for line in read_text(Path(given).expanduser()).splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"api_keys_file {given} cannot be read: {reason(error)}") from None
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise ValueError(f"api_keys_file {given} holds no key: write one a line")
        return data | {"api_keys": [*cls._list(data.get("api_keys", ())), *keys]}

    @field_validator("models")
    @classmethod
    def _one_model_for_each_name(cls, value: tuple[ModelSettings, ...]) -> tuple[ModelSettings, ...]:
        owners: dict[str, int] = {}
        wrong = []
        given = [(index, "name", name) for index, model in enumerate(value) for name in _names(model)]
        given += [(index, "aliases", alias) for index, model in enumerate(value) for alias in model.aliases]
        for index, key, name in given:
            if (owner := owners.setdefault(normalise_name(name), index)) != index:
                text = f"{name} is a name of models[{owner}] ({value[owner].name}) already; remove it from one of them"
                wrong.append(custom_error("twice", (index, key), text))
            elif key == "aliases" and (entry := Catalog.load().find(name)) and entry.id not in _names(value[index]):
                text = f"{name} is the catalog's name of {entry.id}; choose another alias"
                wrong.append(custom_error("taken", (index, key), text))
        if wrong:
            raise ValidationError.from_exception_data("models", wrong, hide_input=True)
        return value

    @model_validator(mode="after")
    def _never_open_by_accident(self) -> NodeSettings:
        problem = "must be an address such as 127.0.0.1, or 0.0.0.0 for all; it is empty"
        if self.host:
            problem = (
                f"binding {self.host} would serve anyone who can reach it: set NPU_NODE_API_KEYS or "
                "NPU_NODE_API_KEYS_FILE, or NPU_NODE_ALLOW_UNAUTHENTICATED=true if something else guards the port"
            )
        if self.faults is not None and not (self.npu_emulation or self.allow_faults):
            raise ValueError("faults are for nodes with npu_emulation, or with allow_faults, and this one has neither")
        if self.announce and self.announce_key is None:
            raise ValueError("announce needs announce_key: npu-gateway nodes enrol NAME makes it")
        if not self.host or not (self.api_keys or self.allow_unauthenticated or is_loopback(self.host)):
            wrong = [custom_error("host", ("host",), problem)]
            raise ValidationError.from_exception_data("host", wrong, hide_input=True)
        return self


def _names(model: ModelSettings) -> list[str]:
    """The name of the settings, and that of the installed model which it stands for."""
    entry = Catalog.load().find(model.name) if model.path is None else None
    return [model.name] if entry is None else [model.name, entry.id]


def read_text(path: Path) -> str:
    """The text of a file of at most 1 MB: another one, such as a device, is a mistake and may have no end."""
    with path.open("rb") as file:
        content = file.read(1_000_001)
    if len(content) > 1_000_000:
        raise OSError(errno.EFBIG, "it is larger than 1 MB")
    return content.decode()


def reason(error: OSError | UnicodeDecodeError) -> str:
    """Why a file cannot be read; never a part of what is in it."""
    return error.strerror or "it cannot be opened" if isinstance(error, OSError) else "it is not UTF-8"
