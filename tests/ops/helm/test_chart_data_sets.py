"""The chart's Job for data sets: a shard a pod, failures of shards, upgrades."""

import shutil

import pytest

from tests.contract.test_helm_chart import CHART
from tests.ops.helm.releases import BULK, LEAST

# A control plane starts once, in half a minute or in minutes on a busy machine; each test installs the chart.
pytestmark = pytest.mark.timeout(1200)


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
