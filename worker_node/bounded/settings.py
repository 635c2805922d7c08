"""The settings of the profile, from the environment variables of its contract."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from worker_node.core.errors import ConfigurationError
from worker_node.settings import ModelSettings, NodeSettings, PlacementSettings, default_compile_cache

ADDRESS = "127.0.0.1"
DEFAULT_PORT = 18820
MAX_BODY_BYTES = 1024 * 1024
PROMPT_TOKENS = 1024


def default_lock() -> Path:
    """`npu-node-npu0.lock` in the user's runtime directory, else in the directory for temporary files."""
    return Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / "npu-node-npu0.lock"


class BoundedSettings(BaseSettings):
    """`OV_GENAI_NPU_*`. `model` is a directory, None the reference model of the store; `cache` a directory.

    `blobs` is a directory that `npu-node compile --profile bounded` made, None compiles the model when it is loaded.
    `lock` is the file that every process locks for the length of a generation on this NPU; `lock_wait_s` is how long
    a job waits for it.
    """

    model_config = SettingsConfigDict(env_prefix="OV_GENAI_NPU_", frozen=True, hide_input_in_errors=True)

    model: Path | None = None
    blobs: Path | None = None
    cache: Path = Field(default_factory=default_compile_cache)
    host: str = ADDRESS
    port: int = Field(default=DEFAULT_PORT, ge=0, le=65535)
    lock: Path = Field(default_factory=default_lock)
    lock_wait_s: float = Field(default=30.0, gt=0, le=600)

    def node_settings(self) -> NodeSettings:
        """The node that this profile is. Raises ConfigurationError for any address but 127.0.0.1.

        Where the NPU's counters are and whether it is emulated come from `NPU_NODE_*`, as for every node.
        """
        if self.host not in {ADDRESS, "localhost"}:
            raise ConfigurationError(
                f"the bounded profile serves on {ADDRESS} only, never on {self.host[:100]}: unset OV_GENAI_NPU_HOST "
                "and --host; to serve others use npu-node serve without --profile"
            )
        return NodeSettings(
            host=ADDRESS,
            port=self.port,
            ollama_port=None,
            models=(bounded_model(blobs=self.blobs),),
            compile_cache=self.cache,
            max_body_bytes=MAX_BODY_BYTES,
            max_connections=64,
        )


def bounded_model(name: str = "bounded", blobs: Path | None = None) -> ModelSettings:
    """The pipeline of the contract: NPU and nothing else; `blobs` is what was compiled for it ahead of time."""
    fixed: dict[str, Any] = {
        "max_prompt_len": PROMPT_TOKENS,
        "min_response_len": 64,
        "prefill_hint": "DYNAMIC",
        "generate_hint": "FAST_COMPILE",
        "blobs": None if blobs is None else str(blobs.expanduser()),
    }
    return ModelSettings(name=name, placements=(PlacementSettings(device="NPU", load="eager"),), **fixed)
