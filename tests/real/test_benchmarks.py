"""The benchmarks as smoke tests: each runs to its end and gives figures, on whatever machine this is."""

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.real, pytest.mark.long, pytest.mark.timeout(1500), pytest.mark.usefixtures("store")]

NAMES = {
    "embeddings",
    "generation",
    "event-loop",
    "overload",
    "footprint",
    "dialects",
    "client-overhead",
    "client-selection",
    "client-faults",
}


def test_every_benchmark_gives_figures(tmp_path):
    # Minutes: each measures in rounds, against a baseline.
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks", "--quick", "--json", str(figures)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    measured = json.loads(figures.read_text())["figures"]
    assert set(measured) == NAMES
    assert all(measured.values())
