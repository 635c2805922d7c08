"""What a child process imports before its work: a node starts several, and each pays for it."""

import subprocess
import sys

import pytest

HEAVY = ["aiohttp", "asyncio", "importlib.metadata", "numpy", "openvino", "pydantic"]


@pytest.mark.parametrize(
    "module", ["worker_node.engines.child", "worker_node.sandbox.worker", "worker_node.tasks.generate.task"]
)
def test_a_child_process_imports_nothing_heavy_by_itself(module):
    script = f"import sys, {module}; print(*(name for name in {HEAVY} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == []
