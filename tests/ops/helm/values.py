"""Values of the chart, together each of them once with something that is not its default."""

from tests.ops.helm.releases import BULK

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
