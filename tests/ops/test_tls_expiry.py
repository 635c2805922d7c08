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


def read_ends(*paths):
    """The metrics of these certificates as the exporter gets them."""
    return subprocess.run(["sh", SCRIPT, *paths], capture_output=True, text=True, check=True).stdout


def test_a_certificate_is_reported_with_its_end_and_what_is_none_as_expired(tmp_path):
    (tmp_path / "broken.pem").write_text("no certificate")
    good, broken, missing = make_certificate(tmp_path, "good", 30), tmp_path / "broken.pem", tmp_path / "missing.pem"
    [family] = text_string_to_metric_families(read_ends(good, broken, missing))
    assert (family.name, family.type) == ("npu_tls_certificate_expiry_timestamp_seconds", "gauge")
    ends = {sample.labels["path"]: sample.value for sample in family.samples}
    end = ssl.cert_time_to_seconds(ssl._ssl._test_decode_cert(good)["notAfter"])
    assert ends == {str(good): end, str(broken): 0, str(missing): 0}
