"""A complete toy task, as a package outside the node would bring it: it counts the vowels of texts.

The node finds it by the entry point in the metadata beside this package. Nothing in `worker_node` knows of it.
"""
