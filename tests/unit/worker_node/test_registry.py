"""How tasks are found: the packages in `worker_node/tasks`, and entry points of installed distributions."""

from importlib import metadata

import pytest

from worker_node import registry
from worker_node.core.errors import ConfigurationError
from worker_node.registry import Task, task_of, tasks

EMBEDDING_TOO = Task(kind="embedding", verb="do", capability="another", serving="nowhere:NOTHING")
NO_TASK = object()


@pytest.fixture
def installed(monkeypatch):
    """Puts entry points into the environment, each naming an object of this file."""

    def install(*names):
        points = [metadata.EntryPoint(name, f"{__name__}:{name}", registry.GROUP) for name in names]
        monkeypatch.setattr(metadata, "entry_points", lambda group: [p for p in points if p.group == group])
        registry.tasks.cache_clear()

    yield install
    monkeypatch.undo()
    registry.tasks.cache_clear()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("EMBEDDING_TOO", "another task serves embedding models already"),
        ("NO_TASK", "is not a worker_node.registry.Task"),
        ("MISSING", "the task MISSING .* cannot be imported .AttributeError: .*repair or uninstall the package"),
    ],
)
def test_a_package_that_cannot_be_registered_is_named(installed, name, message):
    installed(name)
    with pytest.raises(ConfigurationError, match=message):
        tasks()


def test_a_kind_without_a_task_is_named_with_those_that_there_are():
    with pytest.raises(
        ConfigurationError, match=r"no task of this node serves juggling models; .*embedding, generation"
    ):
        task_of("juggling")
