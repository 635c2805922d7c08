"""The settings of one model: `[[models]]` of the file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from worker_node.domain import Device

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
