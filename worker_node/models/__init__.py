"""Models on this machine: what there is, where it comes from, and how it becomes a directory that engines load.

It may import `core`, `devices`, `registry`; `convert` (an extra) runs in a process of its own. Begin with `store.py`:
`ModelStore.pull` follows a name (`sources.py`) to its files and their conversion (`pull.py`, `downloads.py`);
`directory.py` reads the result.
"""
