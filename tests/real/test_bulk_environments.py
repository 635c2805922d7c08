"""Data sets on a Ray cluster and on an S3-compatible server, each in an environment of its own."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.foreign import environment

# They install up to 80 packages on the first run; Ray starts four machines' worth of processes, and actors anew.
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.mark.parametrize("name", ["bulk_ray", "bulk_s3"])
def test_no_row_is_lost_or_repeated(name):
    script = HERE / "environments" / f"{name}.py"
    done = subprocess.run(
        [environment(script.with_suffix(".txt")), script],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert done.stdout.strip().endswith("all as expected")
