from pathlib import Path

from worker_node.devices.npu import npu_users


def process(proc, number, *targets):
    directory = proc / str(number) / "fd"
    directory.mkdir(parents=True)
    for index, target in enumerate(targets):
        (directory / str(index)).symlink_to(target)


def test_processes_that_hold_the_npu_open_are_found(tmp_path):
    process(tmp_path, 12, "/dev/null", "/dev/accel/accel0")
    process(tmp_path, 7, "/dev/accel/accel0")
    process(tmp_path, 6, "/dev/accel/accel1")
    process(tmp_path, 8, "/dev/accelerated", "socket:[1]")
    process(tmp_path, 9)
    (tmp_path / "10").mkdir()
    (tmp_path / "self").mkdir()
    assert npu_users(tmp_path, Path("/dev/accel/accel0")) == [7, 12]


def test_the_real_proc_can_be_read():
    with Path("/dev/null").open() as _:
        assert npu_users(device=Path("/dev/null"))
