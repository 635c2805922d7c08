"""What the node exporter reports of certificates, as Prometheus reads it."""

import ssl
import subprocess

from prometheus_client.parser import text_string_to_metric_families

from tests.ops.containers import run
from tests.ops.playbook import ANSIBLE

SCRIPT = ANSIBLE / "roles" / "npu_monitoring" / "files" / "npu-tls-expiry"


def make_certificate(directory, name, days):
    path = directory / f"{name}.pem"
    keys = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", directory / "key")
    run("openssl", "req", "-x509", *keys, "-out", path, "-days", str(days), "-subj", f"/CN={name}")
    return path


def x509_end(path):
    return ssl.cert_time_to_seconds(ssl._ssl._test_decode_cert(path)["notAfter"])


def read_ends(*paths):
    """The metrics of these certificates as the exporter gets them."""
    return subprocess.run(["sh", SCRIPT, *paths], capture_output=True, text=True, check=True).stdout


def read(*paths):
    [family] = text_string_to_metric_families(read_ends(*paths))
    assert family.name == "npu_tls_certificate_expiry_timestamp_seconds"
    assert family.type == "gauge"
    return {sample.labels["path"]: sample.value for sample in family.samples}


def test_each_certificate_is_reported_with_its_end(tmp_path):
    soon, late = make_certificate(tmp_path, "soon", 2), make_certificate(tmp_path, "late", 300)
    ends = read(soon, late)
    assert ends == {str(path): x509_end(path) for path in (soon, late)}
    assert ends[str(late)] - ends[str(soon)] > 290 * 86400


def test_a_file_that_is_no_certificate_counts_as_expired(tmp_path):
    (tmp_path / "broken.pem").write_text("no certificate")
    good = make_certificate(tmp_path, "good", 30)
    ends = read(tmp_path / "broken.pem", tmp_path / "missing.pem", good)
    assert ends.pop(str(good)) > 0
    assert set(ends.values()) == {0}
