"""Settings of the client: defaults, file, environment, arguments."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    Field,
    SecretStr,
    ValidationError,
    field_validator,
)
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from backend_client._protocol.node_addresses import parse_nodes
from backend_client.errors import ConfigurationError
from backend_client.options import (
    LONGEST_S,
    BatchOptions,
    BreakerOptions,
    ClientOptions,
    FallbackOptions,
    HedgeOptions,
    ProbeOptions,
    RetryOptions,
    Timeouts,
)
from backend_client.settings.cloud import CloudSettings, checked_key
from backend_client.settings.sections import (
    DEFAULTS,
    BatchSettings,
    BreakerSettings,
    FallbackSettings,
    HedgeSettings,
    ProbeSettings,
    RetrySettings,
    TimeoutSettings,
)
from backend_client.settings.variables import CONFIG_VARIABLE, reject_misspelt

DEFAULT_NODE = "http://127.0.0.1:8081"


class ClientSettings(BaseSettings):
    """The client. `nodes` are URLs, or where to find them (`dns://`, `srv://`, `file://`). `spaces` binds models to
    vector spaces from the start, for services that keep vectors.

    A single entry of `spaces` is also the default embedding model. `node_keys`, `ca_file`, `client_cert`, `client_key`
    and `proxy` are those of `NPUClient`.
    """

    model_config = SettingsConfigDict(
        env_prefix="NPU_CLIENT_",
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
    )

    nodes: Annotated[tuple[str, ...], NoDecode] = (DEFAULT_NODE,)
    api_key: SecretStr | None = None
    node_keys: dict[str, SecretStr] = {}
    ca_file: Path | None = None
    client_cert: Path | None = None
    client_key: Path | None = None
    proxy: SecretStr | None = None
    timeouts: TimeoutSettings = TimeoutSettings()
    cloud: CloudSettings | None = None
    local_only: bool = False
    hedge_percentile: float | None = Field(default=None, gt=0, lt=1)
    probe: ProbeSettings = ProbeSettings()
    breaker: BreakerSettings = BreakerSettings()
    retry: RetrySettings = RetrySettings()
    hedge: HedgeSettings = HedgeSettings()
    batch: BatchSettings = BatchSettings()
    fallback: FallbackSettings = FallbackSettings()
    connections_per_node: int = Field(default=DEFAULTS.connections_per_node, gt=0)
    discovery_interval: float = Field(default=DEFAULTS.discovery_interval, gt=0, le=LONGEST_S)
    max_reply_bytes: int = Field(default=DEFAULTS.max_reply_bytes, gt=0)
    spaces: dict[str, str] = {}

    _key = field_validator("api_key")(checked_key)

    @field_validator("nodes", mode="before")
    @classmethod
    def _nodes_by_comma(cls, value: Any) -> Any:
        """`NPU_CLIENT_NODES=http://a:8081,http://b:8081` is two nodes, as is a JSON list of both."""
        if not isinstance(value, str):
            return value
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(urls := json.loads(value), list):
                return urls
        return [url.strip() for url in value.split(",") if url.strip()]

    @field_validator("nodes")
    @classmethod
    def _node_urls(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        parse_nodes(value)
        return value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003  (pydantic-settings calls by position)
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments before environment before file."""
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)

    @classmethod
    def load(cls, config: Path | str | None = None, **values: Any) -> ClientSettings:
        """Read the settings; the TOML file is `config`, else the one that `NPU_CLIENT_CONFIG` names, else none.

        Raises ConfigurationError, with each problem on a line and no value in it.
        """
        reject_misspelt(os.environ, cls)
        path = config or os.environ.get(CONFIG_VARIABLE)
        if path is not None and not Path(path).is_file():
            problem = "is not a file" if Path(path).exists() else "does not exist"
            raise ConfigurationError(f"the configuration file {path} {problem}")

        class FromFile(cls):  # type: ignore[valid-type, misc]
            model_config = SettingsConfigDict(toml_file=path)

        try:
            settings: ClientSettings = FromFile(**values)
        except ValidationError as error:
            problems = [
                f"{'.'.join(map(str, problem['loc'])) or 'settings'}: {problem['msg'].removeprefix('Value error, ')}"
                for problem in error.errors(include_input=False, include_url=False, include_context=False)
            ]
        except tomllib.TOMLDecodeError as error:
            problems = [f"{path}:{_line(error)}: not valid TOML: {str(error).partition(' (at ')[0]}"]
        except UnicodeDecodeError:
            problems = [f"{path}: cannot be read: it is not UTF-8"]
        except OSError as error:
            problems = [f"{path}: cannot be read: {error.strerror or type(error).__name__}"]
        except SettingsError as error:
            # Its text names the field; that of its cause would quote the value.
            name = re.search(r'field "(\w+)"', str(error))
            where = f"NPU_CLIENT_{name[1].upper()}" if name else "the environment"
            problems = [f"{where}: is not valid JSON"]
        else:
            return settings
        raise ConfigurationError("the settings are wrong:\n  " + "\n  ".join(problems))

    @classmethod
    def with_values(cls, settings: ClientSettings | None, values: Mapping[str, Any]) -> ClientSettings:
        """The settings, or those of file and environment, with these values instead. Raises ConfigurationError."""
        if settings is None:
            return cls.load(**values)
        if not isinstance(settings, ClientSettings):
            raise ConfigurationError(
                f"settings is a ClientSettings, not {type(settings).__name__}; give values by name"
            )
        if not values:
            return settings
        given = {name: getattr(settings, name) for name in cls.model_fields}
        return cls.load(**{**given, **values})

    def options(self) -> ClientOptions:
        """The options that these settings give."""
        hedge = self.hedge.model_dump()
        if self.hedge_percentile is not None:
            hedge["percentile"] = self.hedge_percentile
        return ClientOptions(
            timeouts=Timeouts(**self.timeouts.model_dump()),
            probe=ProbeOptions(**self.probe.model_dump()),
            breaker=BreakerOptions(**self.breaker.model_dump()),
            retry=RetryOptions(**self.retry.model_dump()),
            batch=BatchOptions(**self.batch.model_dump()),
            fallback=FallbackOptions(**self.fallback.model_dump()),
            hedge=HedgeOptions(**hedge),
            connections_per_node=self.connections_per_node,
            discovery_interval=self.discovery_interval,
            max_reply_bytes=self.max_reply_bytes,
        )


def _line(error: tomllib.TOMLDecodeError) -> str:
    """The line where the parser gave up; the end of the file when the text ends too early."""
    found = re.search(r"\bline (\d+)", str(error))
    return found[1] if found else "end"
