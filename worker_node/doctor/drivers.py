"""What is known of Intel's NPUs and of the releases of their driver: `driver_pairs.toml` has the releases."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

from worker_node.devices.npu import RELOAD_DRIVER, version_in
from worker_node.doctor.machine import ExaminedMachine, Finding, ok, warning

# Name and generation by PCI device id: the one list of ids. Rules about models know an NPU by the architecture that
# OpenVINO reports, as 3720. A test compares roles, docs and these architectures with it.
NPUS = {
    "7d1d": ("Meteor Lake", "37xx"),
    "ad1d": ("Arrow Lake", "37xx"),
    "643e": ("Lunar Lake", "40xx"),
    "b03e": ("Panther Lake", "50xx"),
    "fd3e": ("Wildcat Lake", "50xx"),
    "d71d": ("Nova Lake", "60xx"),
}
RELEASES = "github.com/intel/linux-npu-driver/releases"


@cache
def known_drivers() -> dict[str, list[dict[str, Any]]]:
    file = files("worker_node.doctor").joinpath("driver_pairs.toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))


def check_driver(driver: str, npu: str, machine: ExaminedMachine, openvino: str | None) -> list[Finding]:
    known, kernel, system = known_drivers(), machine.kernel_release(), machine.system()
    here = re.match(r"\d+\.\d+", openvino or "")
    findings = []

    for row in known["first"]:
        first = row["driver"]
        if row["npu"] == npu and version_in(driver, f"<{first}"):
            found = f"driver {driver} does not know {npu}: {first} is the first that does ({row['source']})"
            findings.append(warning("driver-npu", found, f"install a newer release ({RELEASES})"))

    for row in known["verified"]:
        if not version_in(driver, row["driver"]):
            continue
        if system not in row["systems"] or not version_in(kernel, row["kernel"]):
            found = (
                f"driver {driver} is verified with {' and '.join(row['systems'])} and kernel {row['kernel']}, "
                f"and here are {system or 'an unknown system'} and kernel {kernel} ({row['source']})"
            )
            fix = f"none if npu-node certify passes; else a release that names this system ({RELEASES})"
            findings.append(warning("driver-kernel", found, fix))
        own = row.get("openvino")
        if own is not None and here is not None and version_in(own, f"<{here[0]}"):
            found = f"driver {driver} was made with OpenVINO {own}, and here is {here[0]} ({row['source']})"
            fix = f"none if npu-node certify passes; else a newer release of the driver ({RELEASES})"
            findings.append(warning("driver-openvino", found, fix))

    for row in known["problem"]:
        if version_in(driver, row["driver"]) and version_in(kernel, row["kernel"]):
            found = f"driver {driver} on kernel {kernel}: {row['problem']} ({row['source']})"
            fix = f"a newer kernel; when it happens: {RELOAD_DRIVER}"
            findings.append(warning("driver-kernel", found, fix))

    return findings or [ok("driver-kernel", f"nothing is known against driver {driver} on kernel {kernel}")]
