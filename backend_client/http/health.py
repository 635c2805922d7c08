"""A node's report on /health, as far as the client uses it."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator

ModelKind = Literal["embedding", "generation", "vision", "rerank", "transcription"]
# What errors, tables and logs show of a node: one line, which no terminal takes for a command.
Text = Annotated[str, StringConstraints(max_length=512, pattern="^[^\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]*$")]
# Both write text, and take chats and prompts; those for vision take images as well.
_WRITERS = frozenset({"generation", "vision"})
# What a gateway says that it is, as its `server`.
GATEWAY = "npu-gateway"
SERVING = frozenset({"ready", "degraded"})
# A request to such a model has it loaded, and waits for that.
UNLOADED = "unloaded"
# It is being loaded: for the first time, on demand, or by an engine that is restarted.
LOADING = "loading"


class _Part(BaseModel):
    # A newer node may say more, and that must not make it unusable.
    model_config = ConfigDict(extra="ignore", frozen=True, hide_input_in_errors=True)


class DeviceReport(_Part):
    name: Text
    available: bool = False
    emulated: bool = False
    full_name: Text | None = None
    driver: Text | None = None


class Certification(_Part):
    """What the node's passports say of a model on a device, and why.

    It is certified, limited, failed, expired or not certified; None: the node is of a version that says nothing of it.
    """

    device: Text
    emulated: bool = False
    certified: Text | None = None
    certified_reason: Text | None = None


class ModelReport(_Part):
    """One model. `queue_depth` and `in_flight` count requests of all clients. Older nodes do not tell the aliases.

    `ready_in_s`: it is loading, and likely to serve in this many seconds. `kind` is "" for a model that failed before
    it was known. `engines` are the devices that it is placed on, `excluded` those that it may not run on.
    """

    id: Text
    kind: Text
    aliases: tuple[Text, ...] = ()
    state: Text
    device: Text | None = None
    placements: tuple[Text, ...] = ()
    context_limit: int | None = None
    dimensions: int | None = None
    space: Text | None = None
    queue_depth: int = Field(default=0, ge=0)
    in_flight: int = Field(default=0, ge=0)
    ready_in_s: float | None = Field(default=None, ge=0)
    engines: tuple[Certification, ...] = ()
    excluded: tuple[Certification, ...] = ()

    @field_validator("kind", mode="before")
    @classmethod
    def _unknown(cls, value: object) -> object:
        return "" if value is None else value

    def serves(self, kind: ModelKind) -> bool:
        """Whether requests of that kind are for such a model: images that a model cannot read are for it to refuse."""
        return self.kind in {kind, ""} or (self.kind in _WRITERS and kind in _WRITERS)

    @cached_property
    def serving(self) -> bool:
        """Whether it takes requests."""
        return self.state in SERVING or self.state == UNLOADED

    @cached_property
    def loading(self) -> bool:
        """Whether requests to it wait until it is loaded."""
        return self.state == LOADING

    @cached_property
    def loaded(self) -> bool:
        """Whether it can begin with a request at once."""
        return self.state in SERVING


class HealthReport(_Part):
    """The body of /health. Raises pydantic.ValidationError for anything else."""

    status: Literal["ready", "degraded", "starting", "draining", "failed"]
    version: Text | None = None
    devices: tuple[DeviceReport, ...] = ()
    models: tuple[ModelReport, ...] = ()

    @cached_property
    def serving(self) -> bool:
        """Whether the node takes requests: it is not draining, and some model serves.

        `status` says nothing else about usability: while one model loads, the others serve. A node that hides its
        models (the API key is wrong) is taken at its word, so that its 401 reaches the caller.
        """
        if not self.lists_models:
            return self.status in SERVING
        return self.status != "draining" and any(model.serving for model in self.models)

    @cached_property
    def loading(self) -> bool:
        """Whether the node serves nothing now, and some model is loading."""
        return not self.serving and self.status != "draining" and any(model.loading for model in self.models)

    @cached_property
    def lists_models(self) -> bool:
        """Whether the report has a list of models; without a valid API key it has none."""
        return "models" in self.model_fields_set
