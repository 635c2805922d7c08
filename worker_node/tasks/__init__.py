"""The tasks of this node, one package each: engines, the way of a request, and routes in every dialect.

A task may import everything below `tasks`, but `http` only in its own module or package `http`. Tasks do not import
each other, except `vision`, which is served as generation. The registry finds the packages by their `task` module.
Begin with `embed`, the simplest; CONTRIBUTING.md, "Adding a task", has the parts.
"""
