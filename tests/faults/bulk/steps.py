"""The steps in which a job's output grows, for tests that end a process at each: every effect is one of its store."""

import functools

from backend_client.bulk.stores import LocalStore, Store

STEPS = {
    "job described": ("after", "create", "_job.json"),
    "fragment begun": ("after", "temporary", ""),
    "temporary file complete": ("before", "commit", "part-"),
    "rejected rows committed": ("after", "create", "_rejected/"),
    "data committed": ("after", "commit", "part-"),
    "all fragments committed": ("before", "create", "_SUCCESS"),
    "success written": ("after", "create", "_SUCCESS"),
}
"""In the order in which a run of one fragment passes them."""


def observe(reached):
    """Call `reached` with the name of each step that this process comes to."""
    for store in (LocalStore, Store):
        for name, (when, method, prefix) in STEPS.items():
            if method in vars(store):
                setattr(store, method, _observed(getattr(store, method), name, when, prefix, reached))


def _observed(method, name, when, prefix, reached):
    @functools.wraps(method)
    def observed(self, *arguments):
        matches = any(isinstance(each, str) and each.startswith(prefix) for each in arguments)
        if matches and when == "before":
            reached(name)
        result = method(self, *arguments)
        if matches and when == "after":
            reached(name)
        return result

    return observed
