"""The committed dashboards are what the script makes, are of the SDK's schema, and can be read by people."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

GRAFANA = Path(__file__).parents[2] / "config" / "grafana"
NAMES = ("node", "fleet", "gateway")


def dashboard(name):
    return json.loads((GRAFANA / f"{name}.json").read_text())


def panels(name):
    return [panel for panel in dashboard(name)["panels"] if panel["type"] != "row"]


EACH = [pytest.param(panel, id=f"{name}: {panel['title']}") for name in NAMES for panel in panels(name)]


def test_the_committed_dashboards_are_what_the_script_makes(tmp_path):
    pytest.importorskip("grafana_foundation_sdk", reason="NOT RUN: install '.[dashboards]'")
    subprocess.run([sys.executable, str(GRAFANA / "generate.py"), str(tmp_path)], check=True)
    for name in NAMES:
        assert (tmp_path / f"{name}.json").read_text() == (GRAFANA / f"{name}.json").read_text(), (
            "run config/grafana/generate.py and commit what it writes"
        )


@pytest.mark.parametrize("panel", EACH)
def test_a_panel_can_be_read(panel):
    assert len(panel["description"]) >= 10
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["targets"]
    legends = [target["legendFormat"] for target in panel["targets"]]
    assert all(legends)
    assert len(set(legends)) == len(legends)
    if panel["type"] == "state-timeline":
        assert panel["fieldConfig"]["defaults"]["mappings"]
    for target in panel["targets"]:
        assert target["datasource"]["uid"] == "${datasource}"
        by = re.search(r"^sum by \(([a-z_, ]+)\)", target["expr"])
        if by is not None and "le" not in by[1]:
            told = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert set(by[1].split(", ")) <= told, "series that differ must be told apart"


def test_the_share_of_an_emulated_npu_says_so():
    """Law 1: an emulated NPU is labelled wherever its utilisation is shown over time."""
    shown = [panel for name in NAMES for panel in panels(name) if panel["title"] == "NPU utilisation"]
    graphs = [panel for panel in shown if panel["type"] == "timeseries"]
    assert len(graphs) == 2
    assert all("emulated={{emulated}}" in panel["targets"][0]["legendFormat"] for panel in graphs)
