"""Memory as the kernel tells it: this machine's own, and files of other machines."""

import os

import psutil
import pytest

from worker_node.devices.memory import (
    MachineMemory,
    machine_memory,
    npu_memory,
    oom_kills,
    own_memory,
    resident_memory,
    usable_cores,
)

MIB = 2**20
GONE = 2**22 + 1


def groups(root, group=None, limits=None):
    """Write the files of control groups, in MiB; `limits` are (limit, used, cached) by group."""
    proc, cgroups = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    if group is not None:
        (proc / "self" / "cgroup").write_text(f"0::{group}\n")
    for name, (limit, used, cached) in (limits or {}).items():
        directory = cgroups / name
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "memory.max").write_text("max\n" if limit is None else f"{limit * MIB}\n")
        (directory / "memory.current").write_text(f"{used * MIB}\n")
        (directory / "memory.stat").write_text(f"anon 1\ninactive_file {cached * MIB}\n")
    return proc, cgroups


@pytest.mark.linux
@pytest.mark.parametrize(
    ("group", "limits", "expected"),
    [
        (None, None, (16_000, 8_000)),
        ("/", {".": (None, 3_000, 0)}, (16_000, 8_000)),
        ("/", {".": (4_000, 3_000, 500)}, (4_000, 1_500)),
        ("/a/b", {"a": (6_000, 5_000, 0), "a/b": (None, 2_000, 0)}, (6_000, 1_000)),
        ("/a/b", {"a": (6_000, 1_000, 0), "a/b": (2_000, 2_100, 0)}, (2_000, 0)),
        ("/a", {"a": (64_000, 1_000, 0)}, (16_000, 8_000)),
        ("/a", {}, (16_000, 8_000)),
    ],
)
def test_the_narrowest_limit_counts(tmp_path, monkeypatch, group, limits, expected):
    machine = MachineMemory(16_000 * MIB, 8_000 * MIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    memory = machine_memory(*groups(tmp_path, group, limits))
    assert (memory.total // MIB, memory.available // MIB) == expected


@pytest.mark.linux
def test_the_memory_of_a_process_that_has_ended_is_none():
    assert own_memory(os.getpid()) > MIB
    assert own_memory(GONE) is None
    assert resident_memory(GONE) is None


@pytest.mark.linux
def test_where_no_file_can_be_opened_the_memory_of_a_process_is_not_known_and_no_error(monkeypatch):
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        assert resident_memory(os.getpid()) is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.linux
def test_kills_for_want_of_memory_are_counted_by_the_machine_and_by_our_control_groups(tmp_path):
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (cgroups / "a" / "b").mkdir(parents=True)
    assert oom_kills(proc, cgroups) is None
    (proc / "vmstat").write_text("nr_free_pages 9\noom_kill 2\noom_kill_other 100\n")
    assert oom_kills(proc, cgroups) == 2
    (proc / "self" / "cgroup").write_text("0::/a/b\n")
    (cgroups / "a" / "memory.events").write_text("low 0\noom 5\noom_kill 3\n")
    (cgroups / "a" / "b" / "memory.events").write_text("oom 1\noom_kill 1\n")
    assert oom_kills(proc, cgroups) == 6


@pytest.mark.linux
@pytest.mark.parametrize(
    ("mask", "siblings", "cores"),
    [
        ({0, 1, 2, 3}, {}, 4),
        ({0, 1, 2, 3}, {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}, 2),
        ({0, 2}, {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}, 1),
    ],
)
def test_threads_of_a_core_are_one_and_cores_outside_of_the_mask_none(tmp_path, monkeypatch, mask, siblings, cores):
    monkeypatch.setattr(psutil.Process, "cpu_affinity", lambda _process: sorted(mask))
    for cpu, shared in siblings.items():
        directory = tmp_path / f"cpu{cpu}" / "topology"
        directory.mkdir(parents=True)
        (directory / "thread_siblings_list").write_text(shared + "\n")
    assert usable_cores(tmp_path) == cores


def descriptor(proc, number, text):
    (proc / "7" / "fdinfo").mkdir(parents=True, exist_ok=True)
    (proc / "7" / "fdinfo" / str(number)).write_text(f"pos:\t0\nflags:\t0100002\nino:\t5\n{text}")


@pytest.mark.linux
def test_the_npus_memory_of_a_process_is_that_of_its_clients_each_counted_once(tmp_path):
    def client(number, driver="intel_vpu", size="100 KiB"):
        head = f"drm-driver:\t{driver}\ndrm-client-id:\t{number}\ndrm-pdev:\t0000:00:0b.0\n"
        return f"{head}drm-resident-memory:\t{size}\n"

    assert npu_memory(7, tmp_path) is None
    for number, text in enumerate(("", client(1, driver="i915"), client(2, size="much"))):
        descriptor(tmp_path, number, text)
    assert npu_memory(7, tmp_path) is None
    for number, text in enumerate((client(3), client(3), client(4, size="2 MiB"), client(5, size="0")), start=10):
        descriptor(tmp_path, number, text)
    assert npu_memory(7, tmp_path) == 100 * 2**10 + 2 * MIB
