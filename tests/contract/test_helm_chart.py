"""The Helm chart agrees with the node, its settings and the commands; tests/ops has what renders it."""

import json
import re
import subprocess
from pathlib import Path

import yaml

from backend_client.bulk import ExitCode
from backend_client.bulk.ray_executor import RESOURCE
from backend_client.gateway.settings import GatewaySettings
from backend_client.settings import ClientSettings
from worker_node.http.access import OPEN_PATHS
from worker_node.settings.node import NodeSettings

CHART = Path(__file__).parents[2] / "config" / "helm" / "npu-node"
TEMPLATES = {path.name: path.read_text() for path in (CHART / "templates").iterdir()}
TEXT = "\n".join(TEMPLATES.values())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
# What must be given: the chart has no default for keys.
GIVEN = {"apiKeys": {"keys": ["key-0123456789abcdef"]}}
EVERYTHING = {
    **GIVEN,
    "config": '[[models]]\nname = "x"\n',
    "models": {"volume": "emptyDir", "size": "5Gi", "pull": [["--embedded"]]},
    "serviceMonitor": {"enabled": True},
    "gateway": {"enabled": True, "existingSecret": "gateway"},
    "bulk": {"enabled": True, "source": "s3://in/*.parquet", "out": "s3://out/"},
    "ray": {"enabled": True, "image": "image:1", "authTokenSecret": "token"},
}


def test_every_variable_is_a_setting():
    settings = {
        **{f"NPU_NODE_{name}".upper(): True for name in NodeSettings.model_fields},
        **{f"NPU_CLIENT_{name}".upper(): True for name in ClientSettings.model_fields},
        **{f"NPU_GATEWAY_{name}".upper(): True for name in GatewaySettings.model_fields},
        "NPU_NODE_NPU_EMULATION": True,
    }
    named = {name.split("__")[0] for name in re.findall(r"\bNPU_(?:NODE|CLIENT|GATEWAY)_[A-Z_]+", TEXT)}
    assert any(name.startswith("NPU_GATEWAY_") for name in named)
    assert named <= set(settings)


def test_the_schema_has_each_value_and_no_other():
    def compare(values, schema, path=""):
        assert schema["additionalProperties"] is False, path
        assert set(schema["properties"]) - {"global"} == set(values), path
        for name, value in values.items():
            part = schema["properties"][name]
            if isinstance(value, dict) and "properties" in part and name not in {"resources", "headResources"}:
                compare(value, part, f"{path}.{name}")

    compare(VALUES, SCHEMA)


def test_nodes_get_as_long_to_drain_as_they_may_ask_for_and_then_some():
    (limit,) = [part.le for part in NodeSettings.model_fields["drain_timeout_s"].metadata if hasattr(part, "le")]
    assert SCHEMA["properties"]["drainSeconds"]["maximum"] == limit
    assert VALUES["drainSeconds"] <= limit
    # A node ends its engines within 5 s of the drain: `worker_node.server.run`.
    (more,) = re.findall(r"terminationGracePeriodSeconds: \{\{ add \.Values\.drainSeconds (\d+) \}\}", TEXT)
    assert int(more) > 5


def test_the_user_and_the_directories_are_those_of_the_image():
    image = (CHART.parents[1] / "container" / "Containerfile").read_text()
    assert set(re.findall(r"^USER (\d+):(\d+)$", image, re.MULTILINE)) == {(str(VALUES["user"]),) * 2}
    # What the image says of directories is not writable in the pod: the chart says another.
    written = set(re.findall(r"(NPU_NODE_\w+)=/", image))
    assert written
    assert written <= set(re.findall(r"name: (NPU_NODE_\w+)\n +value: /models/", TEXT))


def test_probes_ask_what_answers_without_a_key():
    paths = re.findall(r'"path" "(/health[^"]*)"', TEXT)
    assert sorted(paths) == ["/health/live", "/health/ready"]
    assert set(paths) <= OPEN_PATHS


def test_a_shard_that_another_pod_cannot_mend_fails_for_good_and_others_are_tried_again():
    (codes,) = re.findall(r"values: \[([\d, ]+)\]", TEMPLATES["bulk.yaml"])
    final = {int(code) for code in codes.split(",")}
    assert final == {2, ExitCode.QUARANTINED, ExitCode.TOO_MANY_REJECTED}
    assert not final & {ExitCode.COMPLETE, ExitCode.FAILED, ExitCode.INTERRUPTED}


def test_the_resource_for_ray_has_the_quotes_that_kuberay_needs():
    (line,) = re.findall(r"^ +resources: ('.*')$", TEMPLATES["ray.yaml"], re.MULTILINE)
    # YAML gives a string with quotes, a shell takes these away, and JSON is left.
    shell = yaml.safe_load(line)
    unquoted = subprocess.run(["sh", "-c", f"printf %s {shell}"], capture_output=True, text=True, check=True).stdout
    assert json.loads(unquoted) == {RESOURCE: 1}
