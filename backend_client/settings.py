"""Settings: defaults, then a TOML file, then `NPU_CLIENT_*` in the environment, then arguments."""

from __future__ import annotations

import os
import re
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from backend_client._protocol.node_addresses import parse_nodes
from backend_client.errors import ConfigurationError
from backend_client.options import ClientOptions, HedgeOptions, Timeouts

DEFAULT_NODE = "http://127.0.0.1:8081"
CONFIG_VARIABLE = "NPU_CLIENT_CONFIG"


def checked_key(key: SecretStr | None) -> SecretStr | None:
    """An API key that can be sent in a header. Raises ValueError, which does not repeat it."""
    if key is not None and not re.fullmatch(r"[!-~]*", key.get_secret_value()):
        raise ValueError("an API key holds no white space and ASCII only; is there a line end in its file?")
    return key


class TimeoutSettings(BaseModel):
    """Seconds; see `options.Timeouts`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    embed: float = Field(default=Timeouts().embed, gt=0)
    generate: float = Field(default=Timeouts().generate, gt=0)
    connect: float = Field(default=Timeouts().connect, gt=0)
    attempt: float = Field(default=Timeouts().attempt, gt=0)
    idle: float = Field(default=Timeouts().idle, gt=0)


class Price(BaseModel):
    """What a cloud model costs, per million tokens, in the currency of the spend cap."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    input: Decimal = Field(ge=0)
    output: Decimal = Field(default=Decimal(0), ge=0)


class CloudSettings(BaseModel):
    """The OpenAI-compatible fallback.

    `chat_model` answers calls that name no model, `chat_models` (the fleet's name: the cloud's) those that do.
    `embedding_models` (vector space: the cloud's name) are the only ones that embed.
    """

    # An error of the model as a whole would quote the API key.
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    api_key: SecretStr
    base_url: str | None = None
    chat_model: str | None = None
    chat_models: dict[str, str] = {}
    embedding_models: dict[str, str] = {}
    max_tokens: int = Field(default=1024, gt=0)
    prices: dict[str, Price] = {}
    spend_cap: Decimal | None = Field(default=None, ge=0)

    _key = field_validator("api_key")(checked_key)

    @field_validator("base_url")
    @classmethod
    def _url_without_credentials(cls, value: str | None) -> str | None:
        """Errors and attempts name the URL."""
        if value is not None and "@" in urlsplit(value).netloc:
            raise ValueError("the cloud's URL holds no user or password: URLs are logged; use cloud.api_key")
        return value

    @model_validator(mode="after")
    def _cap_needs_prices(self) -> CloudSettings:
        models = (self.chat_model, *self.chat_models.values(), *self.embedding_models.values())
        used = {model for model in models if model is not None}
        if self.spend_cap is not None and (unpriced := sorted(used - self.prices.keys())):
            raise ValueError(f"spend_cap needs the price of every model; none is given for {', '.join(unpriced)}")
        return self


class ClientSettings(BaseSettings):
    """The client. `nodes` are URLs, or where to find them (`dns://`, `srv://`, `file://`). `spaces` binds models to
    vector spaces from the start, for services that keep vectors.

    A single entry of `spaces` is also the default embedding model.
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
    timeouts: TimeoutSettings = TimeoutSettings()
    cloud: CloudSettings | None = None
    local_only: bool = False
    hedge_percentile: float | None = Field(default=None, gt=0, lt=1)
    spaces: dict[str, str] = {}

    _key = field_validator("api_key")(checked_key)

    @field_validator("nodes", mode="before")
    @classmethod
    def _nodes_by_comma(cls, value: Any) -> Any:
        """`NPU_CLIENT_NODES=http://a:8081,http://b:8081` is two nodes."""
        return [url.strip() for url in value.split(",") if url.strip()] if isinstance(value, str) else value

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
        path = config or os.environ.get(CONFIG_VARIABLE)
        if path is not None and not Path(path).is_file():
            raise ConfigurationError(f"the configuration file {path} does not exist")

        class FromFile(cls):  # type: ignore[valid-type, misc]
            model_config = SettingsConfigDict(toml_file=path)

        try:
            settings: ClientSettings = FromFile(**values)
        except ValidationError as error:
            problems = [
                f"{'.'.join(map(str, problem['loc'])) or 'settings'}: {problem['msg'].removeprefix('Value error, ')}"
                for problem in error.errors(include_input=False, include_url=False, include_context=False)
            ]
        except (OSError, ValueError):
            problems = [
                f"{path or 'the environment'} cannot be read: it is not valid TOML, or a value is not valid JSON"
            ]
        else:
            return settings
        raise ConfigurationError("the settings are wrong:\n  " + "\n  ".join(problems))

    def options(self) -> ClientOptions:
        """The options with these timeouts and this hedging."""
        hedge = HedgeOptions(percentile=self.hedge_percentile)
        return ClientOptions(timeouts=Timeouts(**self.timeouts.model_dump()), hedge=hedge)
