"""Main configuration files that somebody else wrote are never changed: they read ours, or the run says what to do."""

import contextlib
import json

import pytest

from tests.ops.containers import DEBIAN_12, DEBIAN_13
from tests.ops.playbook import failed, play, succeeded

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


def prometheus_watches(machine):
    groups = json.loads(fetch(machine, "http://127.0.0.1:9090/api/v1/rules"))["data"]["groups"]
    machine.run("rm", "/etc/prometheus/npu-scrapes.yml")
    return {"npu-node", "npu-client"} <= {group["name"] for group in groups}


def caddy_serves_theirs(machine):
    return fetch(machine, "http://127.0.0.1:18080").strip() == "theirs"


SCRAPES = "global: {scrape_interval: 1s}\n"
SITE = ":18080 {\n\trespond theirs\n}\n"
INCLUDING = "rule_files: [/etc/prometheus/npu-alerts.yml]\nscrape_config_files: [/etc/prometheus/npu-scrapes.yml]\n"
IMPORTING = "{\n\tauto_https off\n}\nimport /etc/caddy/*.caddy\n"


@pytest.mark.parametrize(
    ("tag", "path", "service", "theirs", "reading_ours", "holds"),
    [
        ("monitoring", PROMETHEUS, "prometheus", SCRAPES, SCRAPES + INCLUDING, prometheus_watches),
        ("proxy", CADDYFILE, "caddy", SITE, IMPORTING + SITE, caddy_serves_theirs),
    ],
)
def test_a_file_of_others_reads_ours_or_is_left_alone(fleet, tag, path, service, theirs, reading_ours, holds):
    machine = fleet.machines[DEBIAN_13.name]
    with replaced(machine, path, theirs, service):
        failed(limited(fleet, machine, tag), f"{path} of {machine.name} was written by somebody else")
        assert read(machine, path) == theirs

        write(machine, path, reading_ours)
        machine.run("systemctl", "reload-or-restart", service)
        # The run itself checks that Prometheus then scrapes every node.
        succeeded(limited(fleet, machine, tag))
        assert read(machine, path) == reading_ours
        assert holds(machine)


def test_a_default_site_of_nginx_that_somebody_edited_stays(fleet):
    machine = fleet.machines[DEBIAN_12.name]
    theirs = "server {\n    listen 18080;\n    return 204;\n}\n"
    with replaced(machine, WELCOME, theirs, "nginx"):
        machine.run("ln", "-s", WELCOME, ENABLED)
        try:
            succeeded(limited(fleet, machine, "proxy"))
            assert read(machine, ENABLED) == theirs
        finally:
            machine.run("rm", ENABLED)
