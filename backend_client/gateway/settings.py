"""Settings of the gateway itself: `NPU_GATEWAY_*`. Its fleet and its cloud are those of the client: `NPU_CLIENT_*`."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from backend_client.errors import ConfigurationError


class GatewaySettings(BaseSettings):
    """Where the gateway listens, and whose requests it takes.

    `keys` is the file of the keys (`npu-gateway keys add`); without one the gateway listens on loopback only and asks
    for none. `allowed_hosts` are names that it answers to there. `max_body_bytes` bounds a request. `store` counts the
    limits and the spending of teams: limits in this process's memory and spending in the file of the keys, or both in
    a Redis or Valkey (redis://host:6379) that gateways share. Nodes may announce themselves at an address in one of
    `allowed_networks`; without one no node may.
    """

    model_config = SettingsConfigDict(env_prefix="NPU_GATEWAY_", extra="forbid", frozen=True, hide_input_in_errors=True)

    host: str = "127.0.0.1"
    port: int = Field(default=8090, ge=0, le=65535)
    keys: Path | None = None
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = ()
    store: str = "memory://"
    allowed_networks: Annotated[tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...], NoDecode] = ()
    max_body_bytes: int = Field(default=64 * 1024 * 1024, gt=0)

    @field_validator("allowed_hosts", "allowed_networks", mode="before")
    @classmethod
    def _by_comma(cls, value: object) -> object:
        return [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value

    @field_validator("store")
    @classmethod
    def _known_store(cls, value: str) -> str:
        if value != "memory://" and not value.startswith(("redis://", "rediss://")):
            raise ValueError("store must be memory://, redis://host:port or rediss://host:port")
        return value

    @model_validator(mode="after")
    def _open_needs_keys(self) -> GatewaySettings:
        if self.keys is None and not is_loopback(self.host):
            raise ValueError(
                f"host must be a loopback address while there are no keys, got {self.host}; "
                "make one with: npu-gateway keys --keys FILE add NAME, and set NPU_GATEWAY_KEYS=FILE"
            )
        if self.keys is None and self.allowed_networks:
            raise ValueError("allowed_networks needs keys: the file that holds the nodes' enrolments")
        return self

    @classmethod
    def load(cls, **values: object) -> GatewaySettings:
        """The settings of the environment, with these values instead where they are not None.

        Raises ConfigurationError, with each problem on a line.
        """
        try:
            return cls(**{name: value for name, value in values.items() if value is not None})  # type: ignore[arg-type]
        except ValidationError as error:
            problems = [
                f"{'.'.join(map(str, problem['loc'])) or 'settings'}: {problem['msg'].removeprefix('Value error, ')}"
                for problem in error.errors(include_input=False, include_url=False, include_context=False)
            ]
        raise ConfigurationError("the gateway's settings are wrong:\n  " + "\n  ".join(problems))


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens there."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
