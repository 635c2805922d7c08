"""The chart's nodes: placed, admitted, listed, evicted, upgraded, rolled back."""

import base64

import pytest

from tests.ops.helm.releases import LEAST
from tests.ops.helm.values import THIRD
from tests.ops.kubernetes import DEVICE, Refused

# A control plane starts once, in half a minute or in minutes on a busy machine; each test installs the chart.
pytestmark = pytest.mark.timeout(1200)


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
