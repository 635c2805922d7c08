"""The settings of the profile, from the environment variables of its contract."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TextIO

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from worker_node.core.errors import ConfigurationError, EngineUnavailable
from worker_node.core.operating_system import try_lock
from worker_node.settings import ModelSettings, NodeSettings, PlacementSettings, default_compile_cache

ADDRESS = "127.0.0.1"
DEFAULT_PORT = 18820
MAX_BODY_BYTES = 1024 * 1024
PROMPT_TOKENS = 1024


class BoundedSettings(BaseSettings):
    """`OV_GENAI_NPU_*`. `model` is a directory, None the reference model of the store; `cache` a directory.

    `weights` are sha256 of an `openvino_model.bin` that count as the reference model's, separated by commas.
    `blobs` is a directory that `npu-node compile --profile bounded` made, None compiles the model when it is loaded.
    `lock` is the file that every process locks for the length of a generation on this NPU; `lock_wait_s` is how long
    a job waits for it.
    """

    model_config = SettingsConfigDict(env_prefix="OV_GENAI_NPU_", frozen=True, hide_input_in_errors=True)

    model: Path | None = None
    weights: str = Field(default="", pattern="^([0-9a-f]{64}(,[0-9a-f]{64})*)?$")
    blobs: Path | None = None
    cache: Path = Field(
        default_factory=lambda: Path(os.environ.get("NPU_NODE_COMPILE_CACHE") or default_compile_cache())
    )
    host: str = ADDRESS
    port: int = Field(default=DEFAULT_PORT, ge=0, le=65535)
    lock: Path = Field(
        default_factory=lambda: Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / "npu-node-npu0.lock"
    )
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
        # What a job costs and takes does not depend on those before it.
        "enable_prefix_caching": False,
        "blobs": None if blobs is None else str(blobs.expanduser()),
    }
    return ModelSettings(name=name, placements=(PlacementSettings(device="NPU", load="eager"),), **fixed)


# One generation at a time on an NPU, for all processes that lock the same file.

_POLL_S = 0.02


class DeviceLock:
    """An advisory lock (flock) on a file; the kernel frees it when its holder dies."""

    def __init__(self, path: Path, wait_s: float) -> None:
        self.path = path
        self.wait_s = wait_s
        self._turn = asyncio.Lock()  # callers of this process take turns in the order of their arrival

    def problem(self) -> str | None:
        """Why it cannot be locked at all; None otherwise."""
        try:
            self._opened().close()
        except EngineUnavailable as error:
            return error.message
        return None

    def _opened(self) -> TextIO:
        try:
            return self.path.open("a")
        except OSError as error:
            raise EngineUnavailable(
                f"the lock file {self.path} cannot be opened ({error.strerror}); set OV_GENAI_NPU_LOCK"
            ) from None

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Hold the lock while the block runs. Raises EngineUnavailable when it is not free within `wait_s`."""
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(self.wait_s):
                    await stack.enter_async_context(self._turn)
                    file = stack.enter_context(self._opened())
                    while not try_lock(file):  # noqa: ASYNC110  (no event tells when another process unlocks it)
                        await asyncio.sleep(_POLL_S)
            except TimeoutError:
                raise EngineUnavailable(
                    f"the NPU was busy with other jobs for {self.wait_s:g} s; try again later", retry_after=self.wait_s
                ) from None
            yield
