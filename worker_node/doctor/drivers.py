"""What is known of Intel's NPUs and of the releases of their driver: `driver_pairs.toml` has the releases."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Any

from worker_node.devices.npu import RELOAD_DRIVER, version_in
from worker_node.doctor.machine import ExaminedMachine, Finding, ok, warning

# Name and generation by PCI device id: the one list of NPUs. A test compares roles and docs with it.
NPUS = {
    "7d1d": ("Meteor Lake", "37xx"),
    "ad1d": ("Arrow Lake", "37xx"),
    "643e": ("Lunar Lake", "40xx"),
    "b03e": ("Panther Lake", "50xx"),
    "fd3e": ("Wildcat Lake", "50xx"),
    "d71d": ("Nova Lake", "60xx"),
}
RELEASES = "github.com/intel/linux-npu-driver/releases"

_Row = dict[str, Any]


@cache
def known_drivers() -> dict[str, list[_Row]]:
    """The tables of the file, which explains them."""
    file = files("worker_node.doctor").joinpath("driver_pairs.toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))


def check_driver(
    driver: str,
    npu: str,
    machine: ExaminedMachine,
    openvino: str | None,
) -> Iterator[Finding]:
    """What is known of a driver beside this NPU, kernel, system and OpenVINO."""
    known = known_drivers()
    kernel = machine.kernel_release()

    findings = [
        *_first(known["first"], driver, npu),
        *_verified(known["verified"], driver, kernel, machine.system()),
        *_made_with(known["verified"], driver, openvino),
        *_problems(known["problem"], driver, kernel),
    ]
    if not findings:
        found = f"nothing is known against driver {driver} on kernel {kernel}"
        findings = [ok("driver-kernel", found)]
    yield from findings


def _first(rows: list[_Row], driver: str, npu: str) -> Iterator[Finding]:
    for row in rows:
        first, source = row["driver"], row["source"]
        if row["npu"] != npu or not version_in(driver, f"<{first}"):
            continue

        found = f"driver {driver} does not know {npu}: {first} is the first that does ({source})"
        fix = f"install a newer release ({RELEASES})"
        yield warning("driver-npu", found, fix)


def _verified(rows: list[_Row], driver: str, kernel: str, system: str) -> Iterator[Finding]:
    for row in rows:
        if not version_in(driver, row["driver"]):
            continue
        if system in row["systems"] and version_in(kernel, row["kernel"]):
            continue

        systems = " and ".join(row["systems"])
        found = (
            f"driver {driver} is verified with {systems} and kernel {row['kernel']}, "
            f"and here are {system or 'an unknown system'} and kernel {kernel} "
            f"({row['source']})"
        )
        fix = f"none if npu-node certify passes; else a release that names this system ({RELEASES})"
        yield warning("driver-kernel", found, fix)


def _made_with(rows: list[_Row], driver: str, openvino: str | None) -> Iterator[Finding]:
    here = re.match(r"\d+\.\d+", openvino or "")
    if here is None:
        return

    for row in rows:
        own = row.get("openvino")
        if own is None or not version_in(driver, row["driver"]):
            continue
        if not version_in(own, f"<{here[0]}"):
            continue

        found = f"driver {driver} was made with OpenVINO {own}, and here is {here[0]} ({row['source']})"
        fix = f"none if npu-node certify passes; else a newer release of the driver ({RELEASES})"
        yield warning("driver-openvino", found, fix)


def _problems(rows: list[_Row], driver: str, kernel: str) -> Iterator[Finding]:
    for row in rows:
        if not version_in(driver, row["driver"]):
            continue
        if not version_in(kernel, row["kernel"]):
            continue

        found = f"driver {driver} on kernel {kernel}: {row['problem']} ({row['source']})"
        fix = f"a newer kernel; when it happens: {RELOAD_DRIVER}"
        yield warning("driver-kernel", found, fix)
