"""Every value of the chart is accepted by Kubernetes' own API server, and nothing of it is dropped."""

import base64

import pytest
import yaml

from tests.contract.test_helm_chart import VALUES
from tests.ops.helm.values import FIRST, SECOND, THIRD, leaves
from tests.ops.kubernetes import Authority

# A control plane starts once, in half a minute or in minutes on a busy machine; each test installs the chart.
pytestmark = pytest.mark.timeout(1200)


def test_every_value_is_tried():
    defaults = dict(leaves(VALUES))
    tried = {
        path.split(".nodeAffinity")[0]
        for values in (FIRST, SECOND, THIRD)
        for path, value in leaves(values)
        if defaults.get(path) != value
    }
    assert (
        sorted(path for path in defaults if path not in tried and not any(t.startswith(f"{path}.") for t in tried))
        == []
    )


@pytest.mark.parametrize("values", [FIRST, SECOND], ids=["first", "second"])
def test_every_value_is_accepted(release, values, tmp_path):
    installed = release()
    own_secrets(installed, tmp_path)
    done = installed.apply(values)
    assert "would violate" not in done.stderr, done.stderr
    assert "unknown field" not in done.stderr, done.stderr
    name = values.get("fullnameOverride", "r-npu-node")
    daemonset = installed.get(f"apps/v1/daemonsets/{name}")
    spec = daemonset["spec"]["template"]["spec"]
    assert spec["securityContext"]["runAsUser"] == values.get("user", VALUES["user"])
    # Its defaults are what the manifest says, or the server's own: nothing was dropped.
    assert_within(manifest(installed, "DaemonSet"), daemonset)
    for job in installed.get("batch/v1/jobs"):
        # What a list holds has no kind.
        assert_within(manifest(installed, "Job")["spec"], job["spec"])
    if values is FIRST:
        assert_within(
            manifest(installed, "ServiceMonitor"), installed.get(f"monitoring.coreos.com/v1/servicemonitors/{name}")
        )
        assert_within(manifest(installed, "RayCluster"), installed.get(f"ray.io/v1/rayclusters/{name}-ray"))
        assert_within(
            manifest(installed, "NetworkPolicy"), installed.get(f"networking.k8s.io/v1/networkpolicies/{name}")
        )


def own_secrets(installed, directory):
    """What the values name that a user brings."""
    certs = directory / "certs"
    certs.mkdir()
    authority = Authority(certs)
    cert, key = authority.issue("x", "/CN=x", "DNS:x")
    read = {"tls.crt": cert, "tls.key": key, "ca.crt": authority.cert}
    pair = {name: base64.b64encode(path.read_bytes()).decode() for name, path in read.items()}
    keys = {name: base64.b64encode(b"a-key").decode() for name in ("api_keys", "client_key")}
    for name, kind, data in (
        ("own-tls", "kubernetes.io/tls", pair),
        ("own-caller", "kubernetes.io/tls", pair),
        ("own-keys", "Opaque", keys),
    ):
        body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "type": kind, "data": data}
        installed.cluster.request("POST", f"/api/v1/namespaces/{installed.namespace}/secrets", body)


def manifest(installed, kind):
    """What Helm sent of a kind."""
    sent = yaml.safe_load_all(installed.helm("get", "manifest", "r").stdout)
    (found,) = [document for document in sent if document and document["kind"] == kind]
    return found


def assert_within(sent, stored, path=""):
    """All of what was sent is in what is stored; the server may have added to it."""
    if isinstance(sent, dict):
        for name, value in sent.items():
            assert name in stored, f"{path}.{name} was dropped"
            assert_within(value, stored[name], f"{path}.{name}")
    elif isinstance(sent, list):
        assert len(sent) <= len(stored), path
        for number, value in enumerate(sent):
            assert_within(value, stored[number], f"{path}[{number}]")
    else:
        # The server writes amounts in their shortest form: 2 for "2", "1Gi" for "1024Mi".
        assert str(sent) == str(stored), path
