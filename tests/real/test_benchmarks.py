"""The benchmarks as smoke tests: each runs to its end and gives figures, on whatever machine this is."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.real, pytest.mark.long, pytest.mark.timeout(900), pytest.mark.usefixtures("store")]

# Read, since importing the command runs it.
COMMAND = (Path(__file__).parents[2] / "benchmarks" / "__main__.py").read_text(encoding="utf-8")
NAMES = re.findall(r'^    "([a-z-]+)": \w+\.run,$', COMMAND, re.MULTILINE)


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_gives_figures(name, tmp_path):
    # Minutes: it measures in rounds, against a baseline.
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks", "--quick", "--json", str(file), name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(file.read_text())["figures"][name]


def test_benchmarks_were_found():
    assert len(NAMES) > 5
