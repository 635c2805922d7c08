"""What is certified again: what an update made expire, and nothing else. tests/real/test_certify.py runs it."""

from types import SimpleNamespace

import pytest

from worker_node.core.types import Device
from worker_node.manager.placement import ExcludedPlacement
from worker_node.manager.served import FailedModel
from worker_node.models.passports import Standing
from worker_node.recertify import Recertification
from worker_node.settings import ModelSettings


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
    standing = Standing("expired", "it changed", changed=frozenset(changed))
    excluded = ExcludedPlacement(Device.NPU, emulated=False, standing=standing, reason="require_certified is set")
    failed = FailedModel("m", "it has no placement", build=None, excluded=(excluded,))
    settings = SimpleNamespace(models=(ModelSettings(name="m"), ModelSettings(name="other")))
    node = SimpleNamespace(settings=settings, manager=SimpleNamespace(models=(), failed=[failed]))
    found = Recertification(node, None, None)._expired()
    assert found == ([(settings.models[0], Device.NPU)] if again else [])
