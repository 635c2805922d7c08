"""From a request that a task has prepared to its result: the placement, the run with its retries, the proof of the NPU.

Also how the models of the settings are built. It may import the manager and everything below; it knows no HTTP. Read
`routing` and `run` first, then `build`; `task` is what a task implements.
"""
