"""Other projects' clients, frameworks and test suites, and generated requests, against real nodes: `make test-all`.

What they need is installed once, in environments of its own.
"""
