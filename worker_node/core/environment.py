"""Environments of child processes, and the directories of caches.

The node's own environment may hold its API keys and other secrets of its service. Native code, crash reports and
`/proc/<pid>/environ` of a child must not: engines get only the variables that runtimes, loaders and drivers read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from worker_node.core.errors import ConfigurationError

_NAMES = frozenset(
    {"HOME", "LANG", "LANGUAGE", "LOGNAME", "PATH", "TEMP", "TMP", "TMPDIR", "TZ", "USER", "VIRTUAL_ENV"}
    # Windows: sockets, users, drivers.
    | {"APPDATA", "LOCALAPPDATA", "PATHEXT", "PROGRAMDATA", "SYSTEMROOT", "USERNAME", "USERPROFILE", "WINDIR"}
)
# Interpreter, loader and allocator; OpenVINO, its plugins and their libraries; Level Zero and OpenCL; test coverage.
_PREFIXES = (
    "COVERAGE_", "DNNL_", "GLIBC_", "IE_NPU_", "KMP_", "LC_", "LD_", "MALLOC_", "MKL_", "NEO", "NPUW_", "OCL_", "OMP_",
    "ONEAPI_", "ONEDNN_", "OPENBLAS_", "OPENVINO_", "OV_", "PYTHON", "RAYON_", "TBB_", "TOKENIZERS_", "XDG_", "ZEL_",
    "ZES_", "ZE_",
)  # fmt: skip
_OWN = "NPU_NODE_"
_DRIVER_CACHE = "ZE_INTEL_NPU_CACHE_DIR"


def native_environment(own: Mapping[str, str] | None = None) -> dict[str, str]:
    """What of our environment (`own`: another one) processes with native code get: an allow-list, hence no secret.

    The NPU's driver keeps what it compiles with the node's caches, unless the environment says where. By itself it
    would use `ze_intel_npu_cache` beside them, which a service may not write, or in a home, which it may not have.
    """
    own = os.environ if own is None else own
    given = {name: value for name, value in own.items() if name in _NAMES or name.startswith(_PREFIXES)}
    cache = own.get("XDG_CACHE_HOME") or (f"{own['HOME']}/.cache" if own.get("HOME") else None)
    return given if cache is None else {_DRIVER_CACHE: f"{cache}/npu-node/driver"} | given


def tool_environment(own: Mapping[str, str] | None = None) -> dict[str, str]:
    """Our environment for a tool that the user configures through it (pip: indexes, proxies), without our settings."""
    own = os.environ if own is None else own
    return {name: value for name, value in own.items() if not name.startswith(_OWN)}


def cache_home() -> Path:
    """`$XDG_CACHE_HOME`, else `~/.cache`. Raises ConfigurationError for a user without a home."""
    if cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(cache)
    try:
        return Path.home() / ".cache"
    except RuntimeError:
        raise ConfigurationError(
            "this user has no home directory and HOME is not set; set NPU_NODE_MODEL_STORE "
            "(or --model-store) and NPU_NODE_COMPILE_CACHE to directories that can be written"
        ) from None
