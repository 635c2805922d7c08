"""The container image: built without a network from a base made here, run with a read-only root and without rights."""

import contextlib
import hashlib
import json
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

from tests.ops.calls import call, eventually, wait_until_ready
from tests.ops.conftest import EMBEDDER, KEY
from tests.ops.containers import DEBIAN_13, image, run
from tests.support.foreign import environment
from tests.support.nodes import start_node
from tests.support.ports import free_port

# What a container within a container may set; and no timer of systemd: the tests run the check.
LIMITS = ("--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024", "--health-interval=disable", "--runtime=runc")
RIGHTS = ("--read-only", "--cap-drop=all", "--security-opt=no-new-privileges")

# A build installs some 60 wheels into a new environment.
pytestmark = pytest.mark.timeout(7200)

ROOT = Path(__file__).parents[2]
HERE = ROOT / "config" / "container"
NAME = "localhost/npu-ops-node"


def build(base, mounts, *arguments, tag=NAME):
    return run(
        *("podman", "build", "--format=docker", f"--tag={tag}", f"--file={HERE / 'Containerfile'}"),
        f"--build-arg=BASE={base}",
        "--build-arg=PIP_OPTIONS=--no-index --find-links=/wheels --find-links=/build",
        *(f"--volume={mount}:ro" for mount in mounts),
        *arguments,
        ROOT,
        timeout=1800,
    )


@pytest.fixture(scope="module")
def mounts(containers_possible, wheelhouse, build_wheels):
    return [f"{wheelhouse(DEBIAN_13.python)}:/wheels", f"{build_wheels}:/build"]


def driver_archive(directory):
    """An archive with a package as Intel's releases hold them; its URL and hash."""
    tree = directory / "tree"
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "DEBIAN/control").write_text("Package: x\nVersion: 1\nArchitecture: all\nMaintainer: x\nDescription: x\n")
    (tree / "usr/lib").mkdir(parents=True)
    (tree / "usr/lib/libze_intel_npu.so.1").write_text("scripted")
    run("dpkg-deb", "--root-owner-group", "--build", tree, directory / "driver.deb")
    with tarfile.open(directory / "driver.tar.gz", "w:gz") as packed:
        packed.add(directory / "driver.deb", "intel-level-zero-npu.deb")
    return "file:///driver-archive/driver.tar.gz", hashlib.sha256(
        (directory / "driver.tar.gz").read_bytes()
    ).hexdigest()


@pytest.fixture(scope="module")
def built(mounts, tmp_path_factory):
    directory = tmp_path_factory.mktemp("driver")
    url, digest = driver_archive(directory)
    base = image(DEBIAN_13)
    driver = (f"--build-arg=NPU_DRIVER_URL={url}", f"--build-arg=NPU_DRIVER_SHA256={digest}")
    build(base, [*mounts, f"{directory}:/driver-archive"], *driver)
    sizes = [json.loads(run("podman", "image", "inspect", name).stdout)[0]["Size"] for name in (NAME, base)]
    print(f"the image: {sizes[0] / 1e6:.0f} MB, of it the base {sizes[1] / 1e6:.0f} MB")
    return NAME


@pytest.fixture(scope="module")
def container(built, store):
    """A node of the image, with a read-only root; its URL."""
    name = "npu-ops-image"
    run("podman", "rm", "--force", "--ignore", name)
    run(
        *("podman", "run", "--detach", f"--name={name}", *RIGHTS, *LIMITS, "--publish=127.0.0.1::8081"),
        f"--volume={store.root}:/var/lib/npu-node/models:ro",
        f"--env=NPU_NODE_API_KEYS={KEY}",
        f'--env=NPU_NODE_MODELS=[{{"name": "{EMBEDDER}"}}]',
        built,
    )
    try:
        yield name, "http://" + run("podman", "port", name, "8081").stdout.strip()
    finally:
        print(run("podman", "logs", name, check=False).stderr[-2000:])
        run("podman", "rm", "--force", "--time=10", name, check=False)


def once(built, argument, *options, check=True):
    return run("podman", "run", "--rm", *LIMITS, *options, built, argument, check=check)


def test_it_serves_with_a_read_only_root_and_without_rights(container):
    name, url = container
    wait_until_ready(url, KEY)
    assert len(call(url + "/embeddings", KEY, {"texts": ["hello"]})[1]["embeddings"][0]) == 384
    assert run("podman", "exec", name, "id", "-u").stdout.strip() == "10001"
    assert run("podman", "exec", name, "touch", "/opt/x", check=False).returncode != 0
    run("podman", "healthcheck", "run", name)


@pytest.fixture(scope="module")
def small(mounts):
    """An image of the gateway alone."""
    name = f"{NAME}-gateway"
    build(image(DEBIAN_13), mounts, "--target=gateway", "--build-arg=EXTRAS=gateway", tag=name)
    return name


@contextlib.contextmanager
def gateway(of, *options):
    """A gateway of this image in front of a real node of this machine, and a key of a team; its URL."""
    name = "npu-ops-image-gateway"
    run("podman", "rm", "--force", "--ignore", name)
    with start_node(NPU_NODE_MODELS=json.dumps([{"name": EMBEDDER, "placements": ["CPU"]}])) as node:
        port = free_port()
        variables = {
            "NPU_GATEWAY_HOST": "127.0.0.1",
            "NPU_GATEWAY_PORT": port,
            "NPU_GATEWAY_KEYS": "/var/lib/npu-gateway/gateway.db",
            "NPU_CLIENT_NODES": node.url,
        }
        given = [f"--env={key}={value}" for key, value in variables.items()]
        volume = "--volume=npu-ops-gateway:/var/lib/npu-gateway:U"
        limits = (*LIMITS, *RIGHTS, "--network=host", volume)
        run("podman", "run", "--detach", f"--name={name}", *limits, *given, *options, of, "serve")
        try:
            key = run("podman", "exec", name, "npu-gateway", "keys", "add", "team-a").stdout.strip()
            yield name, f"http://127.0.0.1:{port}", key
        finally:
            print(run("podman", "logs", name, check=False).stderr[-2000:])
            run("podman", "rm", "--force", "--time=10", name, check=False)
            run("podman", "volume", "rm", "--force", "npu-ops-gateway", check=False)


def test_the_image_of_the_gateway_has_no_openvino_and_serves_with_keys(small):
    installed = once(small, "list", "--entrypoint=/opt/npu-node/bin/pip").stdout
    assert "limits" in installed
    assert "openvino" not in installed
    with gateway(small) as (name, url, key):
        eventually(lambda: run("podman", "healthcheck", "run", name, check=False).returncode == 0)
        body = {"model": EMBEDDER, "input": "hello"}
        assert len(call(url + "/v1/embeddings", key, body)[1]["data"][0]["embedding"]) == 384
        assert call(url + "/v1/embeddings", KEY, body)[0] == 401
        assert run("podman", "exec", name, "id", "-u").stdout.strip() == "10001"


def test_the_image_of_the_node_runs_the_gateway_by_another_entry_point(built):
    with gateway(built, "--entrypoint=npu-gateway") as (_, url, key):
        wait_until_ready(url, None)
        body = {"model": EMBEDDER, "input": "hello"}
        assert len(call(url + "/v1/embeddings", key, body)[1]["data"][0]["embedding"]) == 384


def test_it_brings_the_driver_that_was_verified(built):
    listed = once(built, "/usr/lib/libze_intel_npu.so.1", "--entrypoint=cat")
    assert listed.stdout == "scripted"


def test_without_a_key_it_does_not_serve_the_network(built):
    done = once(built, "serve", "--read-only", check=False)
    assert done.returncode == 1
    assert "NPU_NODE_API_KEYS" in done.stderr


def test_a_driver_with_another_hash_is_refused(tmp_path):
    (archive := tmp_path / "driver.tar.gz").write_bytes(b"another release")
    program = (sys.executable, HERE / "fetch_driver.py", archive.as_uri())
    done = run(*program, "0" * 64, tmp_path / "driver", check=False)
    assert done.returncode != 0
    assert "NPU_DRIVER_SHA256 is 000" in done.stderr


@pytest.fixture(scope="module")
def compose():
    return yaml.safe_load((HERE / "compose.yaml").read_text(encoding="utf-8"))


def test_every_file_that_compose_mounts_is_there(compose):
    mounts = [mount.split(":")[0] for service in compose["services"].values() for mount in service["volumes"]]
    named = {mount for mount in mounts if not mount.startswith(".")}
    assert named <= set(compose["volumes"])
    assert all((HERE / mount).exists() for mount in set(mounts) - named)


def test_compose_publishes_on_loopback_alone_and_runs_the_node_without_rights(compose):
    ports = [port for service in compose["services"].values() for port in service.get("ports", ())]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)
    node = compose["services"]["node"]
    assert (node["read_only"], node["cap_drop"]) == (True, ["ALL"])


def test_compose_itself_reads_the_file_and_refuses_to_start_without_a_key(monkeypatch):
    program = environment(Path(__file__).with_name("compose.txt")).with_name("podman-compose")
    monkeypatch.setenv("NPU_NODE_API_KEY", "the-key")
    read = yaml.safe_load(run(program, "--file", HERE / "compose.yaml", "config").stdout)
    chat = read["services"]["open-webui"]["environment"]
    assert chat["OPENAI_API_BASE_URL"] == "http://node:8081/v1"
    assert chat["OPENAI_API_KEY"] == "the-key"
    monkeypatch.delenv("NPU_NODE_API_KEY")
    refused = run(program, "--file", HERE / "compose.yaml", "config", check=False)
    assert refused.returncode != 0
    assert "NPU_NODE_API_KEY" in refused.stderr


def test_prometheus_accepts_its_file():
    checked = run("promtool", "check", "config", "--syntax-only", HERE / "prometheus.yml")
    assert "SUCCESS" in checked.stdout
