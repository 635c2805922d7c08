"""Main configuration files that somebody else wrote are never changed: they read ours, or the run says what to do."""

import contextlib
import json

import pytest

from tests.ops.containers import DEBIAN_12, DEBIAN_13
from tests.ops.playbook import play

pytestmark = [pytest.mark.real, pytest.mark.timeout(7200)]

PROMETHEUS = "/etc/prometheus/prometheus.yml"
CADDYFILE = "/etc/caddy/Caddyfile"
WELCOME = "/etc/nginx/sites-available/default"
ENABLED = "/etc/nginx/sites-enabled/default"


def read(machine, path):
    return machine.run("cat", path).stdout


def write(machine, path, text):
    machine.run("sh", "-c", 'printf %s "$1" > "$2"', "sh", text, path)


def fetch(machine, url):
    code = f"import urllib.request; print(urllib.request.urlopen('{url}').read().decode())"
    return machine.run("python3", "-c", code).stdout


@contextlib.contextmanager
def replaced(machine, path, text, service):
    """The file with this text while the block runs; the service reads the old one again after it."""
    old = read(machine, path)
    write(machine, path, text)
    try:
        yield
    finally:
        write(machine, path, old)
        machine.run("systemctl", "reload-or-restart", service)


def limited(fleet, machine, tag):
    return play(fleet.inventory, f"--tags={tag}", f"--limit={machine.name}")


def test_a_prometheus_of_others_reads_our_files_or_is_left_alone(fleet):
    machine = fleet.machines[DEBIAN_13.name]
    theirs = "global: {scrape_interval: 1s}\nscrape_configs: []\n"
    with replaced(machine, PROMETHEUS, theirs, "prometheus"):
        refused = limited(fleet, machine, "monitoring")
        assert refused.status != 0
        assert f"{PROMETHEUS} of {machine.name} was written by somebody else" in refused.text
        assert read(machine, PROMETHEUS) == theirs

        including = (
            "global: {scrape_interval: 1s}\n"
            "rule_files: [/etc/prometheus/npu-alerts.yml]\n"
            "scrape_config_files: [/etc/prometheus/npu-scrapes.yml]\n"
        )
        write(machine, PROMETHEUS, including)
        # The run itself checks that Prometheus then scrapes every node.
        accepted = limited(fleet, machine, "monitoring")
        assert accepted.status == 0, accepted.output[-5000:]
        assert read(machine, PROMETHEUS) == including
        groups = json.loads(fetch(machine, "http://127.0.0.1:9090/api/v1/rules"))["data"]["groups"]
        assert {"npu-node", "npu-client"} <= {group["name"] for group in groups}
        machine.run("rm", "/etc/prometheus/npu-scrapes.yml")


def test_a_caddyfile_of_others_imports_our_site_or_is_left_alone(fleet):
    machine = fleet.machines[DEBIAN_13.name]
    theirs = ":18080 {\n\trespond theirs\n}\n"
    with replaced(machine, CADDYFILE, theirs, "caddy"):
        refused = limited(fleet, machine, "proxy")
        assert refused.status != 0
        assert f"{CADDYFILE} of {machine.name} was written by somebody else" in refused.text
        assert read(machine, CADDYFILE) == theirs

        importing = "{\n\tauto_https off\n}\nimport /etc/caddy/*.caddy\n" + theirs
        write(machine, CADDYFILE, importing)
        machine.run("systemctl", "reload", "caddy")
        accepted = limited(fleet, machine, "proxy")
        assert accepted.status == 0, accepted.output[-5000:]
        assert read(machine, CADDYFILE) == importing
        assert fetch(machine, "http://127.0.0.1:18080").strip() == "theirs"


def test_a_default_site_of_nginx_that_somebody_edited_stays(fleet):
    machine = fleet.machines[DEBIAN_12.name]
    theirs = "server {\n    listen 18080;\n    return 204;\n}\n"
    with replaced(machine, WELCOME, theirs, "nginx"):
        machine.run("ln", "-s", WELCOME, ENABLED)
        try:
            outcome = limited(fleet, machine, "proxy")
            assert outcome.status == 0, outcome.output[-5000:]
            assert read(machine, ENABLED) == theirs
        finally:
            machine.run("rm", ENABLED)
