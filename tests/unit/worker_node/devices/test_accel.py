"""The NPU is found by its driver among several accelerators, in a tree as the kernel lays it out."""

import pytest

from worker_node.devices.npu import find_npu


def accelerator(root, number, driver):
    device = root / "devices" / f"pci{number}"
    device.mkdir(parents=True)
    if driver is not None:
        (root / "drivers" / driver).mkdir(parents=True, exist_ok=True)
        (device / "driver").symlink_to(f"../../drivers/{driver}")
    entry = root / "class" / f"accel{number}"
    entry.mkdir(parents=True)
    (entry / "device").symlink_to(device)


@pytest.mark.parametrize(
    ("drivers", "expected"),
    [
        ({0: "intel_vpu"}, "accel0"),
        ({0: "habanalabs", 1: "intel_vpu"}, "accel1"),
        ({0: "amdxdna", 2: "habanalabs", 10: "intel_vpu"}, "accel10"),
        ({0: None, 1: "intel_vpu"}, "accel1"),
        ({2: "intel_vpu", 10: "intel_vpu"}, "accel2"),
        ({0: "amdxdna"}, "accel0"),
        ({}, "accel0"),
    ],
)
def test_the_npu_is_the_first_accelerator_with_its_driver(tmp_path, drivers, expected):
    for number, driver in drivers.items():
        accelerator(tmp_path, number, driver)
    assert find_npu(tmp_path / "class") == tmp_path / "class" / expected / "device"
