"""Settings: defaults, then a TOML file, then `NPU_CLIENT_*` in the environment, then arguments."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from backend_client.errors import ConfigurationError
from backend_client.http.addresses import parse_nodes, sendable_key
from backend_client.options import ClientOptions

CONFIG_VARIABLE = "NPU_CLIENT_CONFIG"
DEFAULT_NODE = "http://127.0.0.1:8081"


_SECRET_HEADERS = frozenset({"authorization", "cookie", "proxy-authorization", "x-session-id"})


def checked_key(key: SecretStr | None) -> SecretStr | None:
    """An API key that can be sent in a header. Raises ValueError, which does not repeat it."""
    if key is not None:
        sendable_key(key.get_secret_value())
    return key


class Price(BaseModel):
    """What a cloud model costs, per million tokens, in the currency of the spend cap."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    input: Decimal = Field(ge=0)
    output: Decimal = Field(default=Decimal(0), ge=0)


class CloudSettings(BaseModel):
    """The OpenAI-compatible fallback.

    `chat_model` answers calls that name no model, `chat_models` (the fleet's name: the cloud's) those that do.
    `answers_as` (the cloud's name: names) are other names under which replies of a chat model may come, "*" for any: of
    a deployment, an alias or a router. Versions of a name and a provider before it need no entry.
    `embedding_models` (vector space: the cloud's name) are the only ones that embed. `extra_headers` names those of a
    call's extra_headers that the cloud gets too.
    """

    # An error of the model as a whole would quote the API key.
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    api_key: SecretStr
    base_url: str | None = None
    chat_model: str | None = None
    chat_models: dict[str, str] = {}
    answers_as: dict[str, tuple[str, ...]] = {}
    embedding_models: dict[str, str] = {}
    extra_headers: tuple[str, ...] = ()
    max_tokens: int = Field(default=1024, gt=0)
    prices: dict[str, Price] = {}
    spend_cap: Decimal | None = Field(default=None, ge=0)

    _key = field_validator("api_key")(checked_key)

    @field_validator("extra_headers")
    @classmethod
    def _no_credentials(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        """A caller's credentials and the name of its session are for this service."""
        if secret := {name.lower() for name in value} & _SECRET_HEADERS:
            raise ValueError(f"{', '.join(sorted(secret))} must not go to the cloud; its key is cloud.api_key")
        return value

    @field_validator("base_url")
    @classmethod
    def _url_without_credentials(cls, value: str | None) -> str | None:
        """Errors and attempts name the URL."""
        if value is not None and "@" in urlsplit(value).netloc:
            raise ValueError("the cloud's URL holds no user or password: URLs are logged; use cloud.api_key")
        # An empty one would mean OpenAI's own: what a variable without a value must not decide.
        if value is not None and (urlsplit(value).scheme not in {"http", "https"} or not urlsplit(value).netloc):
            raise ValueError("the cloud's URL is given as https://host/v1; without one it is OpenAI's")
        if value is not None and (urlsplit(value).query or urlsplit(value).fragment):
            raise ValueError("the cloud's URL must not have a query: URLs are logged; use cloud.api_key")
        return value

    @model_validator(mode="after")
    def _cap_needs_prices(self) -> CloudSettings:
        models = (self.chat_model, *self.chat_models.values(), *self.embedding_models.values())
        used = {model for model in models if model is not None}
        if self.spend_cap is not None and (unpriced := sorted(used - self.prices.keys())):
            raise ValueError(f"spend_cap needs the price of every model; none is given for {', '.join(unpriced)}")
        return self


class ClientSettings(BaseSettings, ClientOptions):
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
    cloud: CloudSettings | None = None
    local_only: bool = False
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
        _reject_unknown_variables(os.environ)
        path = config or os.environ.get(CONFIG_VARIABLE) or None
        if path is not None and not (Path(path).is_file() and Path(path).stat().st_size <= 1_000_000):
            problem = "is not a file of at most 1 MB" if Path(path).exists() else "does not exist"
            raise ConfigurationError(f"the configuration file {path} {problem}")

        class FromFile(cls):  # type: ignore[valid-type, misc]
            model_config = SettingsConfigDict(toml_file=path)

        try:
            settings: ClientSettings = FromFile(**values)
        except ValidationError as error:
            problems = [
                f"{'.'.join(map(str, problem['loc'])) or 'settings'}: {_message(problem)}"
                for problem in error.errors(include_input=False, include_url=False, include_context=False)
            ]
        except tomllib.TOMLDecodeError as error:
            problems = [f"{path}: not valid TOML: {error}"]
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
        return ClientOptions(**{name: getattr(self, name) for name in ClientOptions.model_fields})


def _reject_unknown_variables(environment: Mapping[str, str]) -> None:
    """Raise ConfigurationError for a variable with our prefix that no setting reads; a mistake would go unnoticed."""
    known = {CONFIG_VARIABLE, *(f"NPU_CLIENT_{name}".upper() for name in _variables(ClientSettings))}
    problems = []
    for name in sorted(name for name in environment if name.upper().startswith("NPU_CLIENT_")):
        # Below a mapping, such as that of prices, the keys are anything.
        if name.upper() in known or any(name.upper().startswith(open_[:-1]) for open_ in known if open_.endswith("*")):
            continue
        close = difflib.get_close_matches(name.upper(), sorted(known), 1)
        hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(sorted(known))}"
        problems.append(f"{name}: there is no such setting; {hint}")
    if problems:
        raise ConfigurationError("the environment is wrong:\n  " + "\n  ".join(problems))


def _message(problem: ErrorDetails) -> str:
    if problem["type"] != "extra_forbidden":
        return problem["msg"].removeprefix("Value error, ")
    close = difflib.get_close_matches("__".join(map(str, problem["loc"])), _variables(ClientSettings), 1)
    hint = f"did you mean {close[0].replace('__', '.')}?" if close else "docs/client/settings.md has them all"
    return f"there is no such setting; {hint}"


def _variables(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The names of all settings, nested ones with `__`; `name__*` stands for the keys of a mapping."""
    for name, field in model.model_fields.items():
        yield prefix + name
        if get_origin(field.annotation) is dict:
            yield f"{prefix}{name}__*"
        for part in (field.annotation, *get_args(field.annotation)):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from _variables(part, f"{prefix}{name}__")
