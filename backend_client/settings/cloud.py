"""Settings of the cloud behind the nodes."""

from __future__ import annotations

from decimal import Decimal
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    field_validator,
    model_validator,
)

from backend_client._protocol.identity import sendable_key

_SECRET_HEADERS = frozenset({"authorization", "cookie", "proxy-authorization"})


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
    `embedding_models` (vector space: the cloud's name) are the only ones that embed. `extra_headers` names those of a
    call's extra_headers that the cloud gets too.
    """

    # An error of the model as a whole would quote the API key.
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    api_key: SecretStr
    base_url: str | None = None
    chat_model: str | None = None
    chat_models: dict[str, str] = {}
    embedding_models: dict[str, str] = {}
    extra_headers: tuple[str, ...] = ()
    max_tokens: int = Field(default=1024, gt=0)
    prices: dict[str, Price] = {}
    spend_cap: Decimal | None = Field(default=None, ge=0)

    _key = field_validator("api_key")(checked_key)

    @field_validator("extra_headers")
    @classmethod
    def _no_credentials(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        """A caller's credentials are for this service."""
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
