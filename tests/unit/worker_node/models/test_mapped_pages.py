"""Mapped files are kept out of resident memory, and nothing of them is lost."""

from pathlib import Path

import numpy as np

from worker_node.models.convert.gguf import drop_pages, note_mapped


def resident_kb(file):
    """What this process has of a mapped file in memory, in kB."""
    lines = iter(Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines())
    return sum(int(next(x for x in lines if x.startswith("Rss:")).split()[1]) for line in lines if line.endswith(file))


def test_pages_that_were_written_leave_memory_and_keep_their_values(tmp_path):
    file = str(tmp_path / "weights.f16")
    values = np.memmap(file, np.float16, "w+", shape=(512, 1024))
    values[:] = np.arange(512)[:, None]
    note_mapped(values)
    assert resident_kb(file) >= 1024
    drop_pages()
    assert resident_kb(file) == 0
    assert (values[:, 7] == np.arange(512)).all()


def test_what_is_no_longer_mapped_and_what_never_was_do_no_harm(tmp_path):
    values = np.memmap(tmp_path / "weights.f16", np.float16, "w+", shape=(8, 8))
    note_mapped(values)
    note_mapped(np.zeros(8))
    del values
    drop_pages()
