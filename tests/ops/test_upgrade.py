"""Upgrades of a fleet that is being used: one that is good, and one whose canary fails."""

import asyncio
import shutil
import threading

import pytest

from backend_client import NPUClient
from backend_client.options import ClientOptions, ProbeOptions
from tests.contract.test_distribution import VERSION
from tests.ops.calls import call, wait_until_ready
from tests.ops.conftest import EMBEDDER, KEY, build_wheel
from tests.ops.playbook import ROOT, finish, start

pytestmark = [pytest.mark.real, pytest.mark.timeout(7200)]

CALLERS = 3
# Enough that something is always in flight, and cores are left for the upgrade itself.
PAUSE_S = 0.1


def release(directory, version, *edits):
    """A wheel of this checkout under another version, with `edits` (file, old text, new text) in its source."""
    source = directory / f"source-{version}"
    source.mkdir()
    for name in ("worker_node", "backend_client", "docs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("npu_commands.py", "pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, source)
    for file, old, new in (("pyproject.toml", f'version = "{VERSION}"', f'version = "{version}"'), *edits):
        text = (source / file).read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{file} has no {old!r} to replace"
        (source / file).write_text(text.replace(old, new), encoding="utf-8")
    return build_wheel(source, directory / f"wheel-{version}")


class Load:
    """Callers that embed again and again until told to stop; every answer and every failure is counted."""

    def __init__(self, urls):
        self._urls = urls
        self._stop = threading.Event()
        self.answers = 0
        self.failures = []
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join(600)
        assert not self._thread.is_alive()

    async def _run(self):
        # Both machines and the upgrade share this one's cores: a node that is slow to answer its probe is not gone.
        options = ClientOptions(probe=ProbeOptions(timeout=10))
        async with NPUClient(self._urls, api_key=KEY, options=options) as client:
            await asyncio.gather(*(self._call(client, caller) for caller in range(CALLERS)))

    async def _call(self, client, caller):
        while not self._stop.is_set():
            try:
                # Each text is new, so that no cache answers for an engine.
                vector = await client.embed(f"caller {caller} asks for the {self.answers}th time")
                assert len(vector) == 384
            except Exception as error:  # noqa: BLE001  (whatever it is, it counts as lost)
                self.failures.append(repr(error))
            else:
                self.answers += 1
            await asyncio.sleep(PAUSE_S)


@pytest.fixture
def urls(fleet):
    return [f"http://{machine.address}:8081" for machine in fleet.machines.values()]


def versions(urls):
    return [call(f"{url}/health", KEY)[1]["version"] for url in urls]


def upgrade(fleet, wheel):
    """Bring the fleet to another release, as an operator does."""
    release = {"npu_node_wheel": str(wheel), "npu_node_index_requirement": ""}
    return finish(start(fleet.inventory, "--tags=node", **release))


def test_an_upgrade_under_load_loses_no_request_and_a_bad_one_goes_back(fleet, urls, tmp_path):
    good = release(tmp_path, "0.1.1")
    bad = release(
        tmp_path,
        "0.1.2",
        ("worker_node/tasks/embed/service.py", '"nd,nd->n", found', '"nd,nd->n", -found'),
    )
    for url in urls:
        wait_until_ready(url, KEY)
    with Load(urls) as load:
        upgraded = upgrade(fleet, good)
        after_upgrade = load.answers
        assert upgraded.status == 0, upgraded.output[-6000:]
        assert not any("Certify" in task for task in upgraded.changed_tasks()), "the passports hold for the new release"
        assert versions(urls) == ["0.1.1", "0.1.1"]

        failed = upgrade(fleet, bad)
    assert load.failures == []
    assert after_upgrade > CALLERS
    assert load.answers > after_upgrade

    # It fails aloud, at the first node, and says why; both nodes serve what they served before.
    assert failed.status != 0
    assert "was rolled back" in failed.text
    assert "0.1.1" in failed.text
    assert "cosine" in failed.text
    first, second = fleet.machines.values()
    assert failed.failed[first.name] == 1
    assert second.name not in failed.changed or failed.changed[second.name] == 0
    assert versions(urls) == ["0.1.1", "0.1.1"]
    for url in urls:
        assert {model["id"] for model in wait_until_ready(url, KEY)["models"]} >= {EMBEDDER}
    linked = first.run("readlink", "/opt/npu-node/current").stdout.strip()
    assert linked.startswith("/opt/npu-node/releases/0.1.1-")
    print(f"answered under load: {load.answers}, lost: {len(load.failures)}")
