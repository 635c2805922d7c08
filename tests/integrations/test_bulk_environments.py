"""Data sets on Ray and on an S3-compatible server, each installed apart."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.foreign import environment

# They install up to 80 packages on the first run; Ray starts four machines' worth of processes, and again.
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.mark.parametrize("name", ["bulk_ray", "bulk_s3"])
def test_no_row_is_lost_or_repeated(name, tmp_path):
    # The project itself is not installed there, and a node tells its version.
    metadata = tmp_path / "npu_node-0.0.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: npu-node\nVersion: 0.0.0\n")
    script = HERE / "environments" / f"{name}.py"
    done = subprocess.run(
        [environment(HERE / "environments" / f"{name}.txt"), script],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert done.stdout.strip().endswith("all as expected")
