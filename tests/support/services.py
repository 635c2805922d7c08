"""The services that the path of a request needs, around models that a test chooses."""

import pytest

from worker_node.manager.manager import ModelManager
from worker_node.models.store import ModelStore
from worker_node.observability.metrics import Telemetry
from worker_node.serving.run import Services
from worker_node.tasks.generate.metrics import GenerationMetrics


def manager_of(models=(), store=None):
    """A manager of these models alone, which builds no others."""
    return ModelManager(models, store or ModelStore(), lambda installed: pytest.fail(f"{installed.id} was built"))


def services_of(models=(), store=None, **more):
    """Services for these models; `more` are fields of `Services`."""
    telemetry = Telemetry()
    telemetry.declare(GenerationMetrics)
    return Services(manager_of(models, store), telemetry, **more)
