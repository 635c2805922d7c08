"""The alert rules by promtool's own tests, and what every rule must have besides."""

import functools
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

# promtool takes ten seconds of a core for the rules' tests, and a minute on a busy machine.
pytestmark = pytest.mark.timeout(1200)

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "config" / "prometheus"
RUNBOOKS = ROOT / "docs" / "alerts.md"
# It fires always: that it is silent is what nobody must see.
WATCHDOG = "NPUWatchdog"


@pytest.fixture(scope="module")
def promtool():
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("NOT RUN: the alert rules are tested by promtool; apt-get install prometheus")
    return found


@functools.cache
def rules():
    groups = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


@functools.cache
def cases():
    """For each alert, the times at which its tests expect it, and those at which they do not."""
    found = dict.fromkeys(rules(), (0, 0))
    for group in yaml.safe_load((PROMETHEUS / "alerts_test.yml").read_text())["tests"]:
        for case in group["alert_rule_test"]:
            firing, silent = found[case["alertname"]]
            found[case["alertname"]] = (firing + bool(case["exp_alerts"]), silent + (not case["exp_alerts"]))
    return found


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True, cwd=PROMETHEUS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_rule_fires_and_is_silent_as_it_should(promtool):
    run(promtool, "test", "rules", "alerts_test.yml")


def test_the_rules_and_the_scrape_configuration_are_read(promtool):
    run(promtool, "check", "rules", "alerts.yml")
    run(promtool, "check", "config", "--syntax-only", "prometheus.yml")


@pytest.mark.parametrize("name", rules())
def test_a_rule_has_a_test_of_its_firing_and_of_its_silence(name):
    firing, silent = cases()[name]
    assert firing >= 1
    assert silent >= 1 or name == WATCHDOG


@pytest.mark.parametrize(("name", "rule"), rules().items(), ids=list(rules()))
def test_a_rule_says_how_bad_it_is_and_what_to_do(name, rule):
    assert rule["labels"]["severity"] in ({"none"} if name == WATCHDOG else {"critical", "warning"})
    annotations = rule["annotations"]
    assert set(annotations) == {"summary", "description", "runbook_url"}
    assert "{{" in annotations["summary"] or name == WATCHDOG, "a summary names the node, the model or the figure"
    # RUNBOOKS is what the role, or sed, replaces by where the page is published.
    assert annotations["runbook_url"] == f"https://RUNBOOKS#{name.lower()}"
    section = re.search(rf"^### {name}$(.+?)(?=^##|\Z)", RUNBOOKS.read_text(), re.MULTILINE | re.DOTALL)
    assert section is not None, f"docs/alerts.md has no section {name}"
    assert len(section[1].split()) >= 15
