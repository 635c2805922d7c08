"""Which tests change the shared node: its engines are to be the same processes after each test.

A report and no failure: the node itself replaces an engine whose memory grows.
"""

import pytest


class SharedNodeWatch:
    """A pytest plugin: the summary names each test after which `node` or `whole_node` had other engines."""

    def __init__(self):
        self._engines = {}
        self._found = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        arguments = getattr(item, "funcargs", {})
        nodes = [arguments.get(name) for name in ("node", "whole_node")]
        report = yield
        for node in nodes:
            if call.when != "call" or getattr(node, "engines", None) is None:
                continue
            engines = node.engine_processes()
            if engines != self._engines.setdefault(node.url, node.engines):
                report.user_properties.append(("changed_shared_node", True))
                self._engines[node.url] = engines
        return report

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and ("changed_shared_node", True) in report.user_properties:
            self._found.append(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter):
        if self._found:
            terminalreporter.section("the shared node had other engines after")
            for nodeid in self._found:
                terminalreporter.write_line(nodeid)
