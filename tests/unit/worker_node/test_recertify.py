"""What is certified again: what an update made expire, and nothing else. tests/real/test_certify.py runs it."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from worker_node.core.types import Device
from worker_node.manager.placement import ExcludedPlacement
from worker_node.manager.served import FailedModel
from worker_node.models.passports import Standing
from worker_node.recertify import Recertification
from worker_node.settings import ModelSettings

DAY_S = 86_400.0


def node_with_a_model_of(changed):
    """A node whose first model has no placement, since its passport expired for these changes."""
    standing = Standing("expired", "it changed", changed=frozenset(changed))
    excluded = ExcludedPlacement(Device.NPU, emulated=False, standing=standing, reason="require_certified is set")
    failed = FailedModel("m", "it has no placement", build=None, excluded=(excluded,))
    return SimpleNamespace(
        settings=SimpleNamespace(models=(ModelSettings(name="m"), ModelSettings(name="other"))),
        manager=SimpleNamespace(models=(), failed=[failed]),
        state=SimpleNamespace(idle_since=time.monotonic() - 1000, draining=False),
    )


@pytest.mark.parametrize(
    ("changed", "again"),
    [
        ({"driver"}, True),
        ({"driver", "compiler", "openvino"}, True),
        ({"driver", "settings_hash"}, False),
        ({"model_hash"}, False),
        (set(), False),
    ],
)
def test_a_model_that_requires_a_passport_is_certified_again_after_an_update(changed, again):
    node = node_with_a_model_of(changed)
    found = Recertification(node, None, None)._expired()
    assert found == ([(node.settings.models[0], Device.NPU)] if again else [])


async def test_a_certification_without_a_result_is_tried_again_the_next_day(monkeypatch):
    tried, now = asyncio.Queue(), [5.0]

    async def certify(_, wanted, device):
        tried.put_nowait((now[0], wanted.name, device))
        return True

    monkeypatch.setattr(Recertification, "_certify", certify)
    recertification = Recertification(node_with_a_model_of({"driver"}), None, None, look_s=0, clock=lambda: now[0])
    running = asyncio.create_task(recertification.run(idle_s=10))
    assert await tried.get() == (5.0, "m", Device.NPU)
    for now[0] in (6.0, DAY_S):
        for _ in range(10):
            await asyncio.sleep(0)
        assert tried.empty()
    now[0] = DAY_S + 5
    assert await tried.get() == (DAY_S + 5, "m", Device.NPU)
    running.cancel()
