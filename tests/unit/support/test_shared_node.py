"""The report of tests that change the shared node."""

from types import SimpleNamespace

from tests.support.shared_node import SharedNodeWatch


def outcome(watch, nodeid, node):
    """Run one test under the plugin; the name is in the summary if the test changed the node."""
    item = SimpleNamespace(funcargs={"node": node})
    report = SimpleNamespace(nodeid=nodeid, when="call", user_properties=[])
    hook = watch.pytest_runtest_makereport(item, SimpleNamespace(when="call"))
    next(hook)
    try:
        hook.send(report)
    except StopIteration as done:
        watch.pytest_runtest_logreport(done.value)


def test_only_the_test_after_which_the_engines_are_others_is_named():
    watch = SharedNodeWatch()
    running = {7, 8}
    shared = SimpleNamespace(url="http://one", engines=frozenset(running), engine_processes=lambda: set(running))
    outcome(watch, "innocent", shared)
    running.remove(8)
    outcome(watch, "guilty", shared)
    outcome(watch, "later", shared)
    outcome(watch, "other", SimpleNamespace(url="http://two"))
    lines = []
    watch.pytest_terminal_summary(SimpleNamespace(section=lines.append, write_line=lines.append))
    assert lines == ["the shared node had other engines after", "guilty"]
