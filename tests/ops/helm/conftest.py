"""The chart on the programs of Kubernetes' control plane, where KUBEBUILDER_ASSETS names a directory with them.

docs/cluster.md says which. It starts once for all files here.
"""

import os
from pathlib import Path

import pytest
import yaml

from tests.ops.helm.releases import Release, objects
from tests.ops.kubernetes import control_plane, missing_programs

# Resources of operators, by their own definitions where a directory with these files is named; else any object will do.
OPERATORS = {
    "servicemonitors": ("monitoring.coreos.com", "v1", "ServiceMonitor"),
    "rayclusters": ("ray.io", "v1", "RayCluster"),
}
OPERATORS_VARIABLE = "NPU_NODE_OPERATOR_CRDS"


@pytest.fixture(scope="session")
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
