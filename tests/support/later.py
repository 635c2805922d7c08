"""Modules that are imported when they are first used: every worker imports every test file, and runs few of them."""

import importlib


class Later:
    """Stands for a module that takes long to import."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, attribute):
        if attribute.startswith("_"):  # pytest asks each name of a test file whether it is a fixture
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
