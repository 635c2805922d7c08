"""Installs the node of this checkout into an environment: `python packaging/install_node.py PYTHON`, for make.

pip spends most of its time on the index's pages, one after the other. What it would find is known (constraints.txt,
node-packages.txt), so several pips install a part each, without looking for dependencies; `pip check` then says whether
anything is missing. Where a part fails, pip installs all in its own way, and says what is wrong.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = 4
# For an interrupted pip to remove what it has unpacked.
_LAST_S = 5.0
EXTRAS = ".[node,convert]"


def packages() -> list[str]:
    """The names in node-packages.txt, those that take longest first."""
    lines = (ROOT / "packaging" / "node-packages.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def main(python: str) -> int:
    """Install; the status of the last pip, 130 when interrupted. Run again, it goes on from what is installed."""
    try:
        return _install(python)
    except KeyboardInterrupt:
        return 130


def _install(python: str) -> int:
    pip = [python, "-m", "pip", "--quiet", "--quiet", "--disable-pip-version-check"]
    install = [*pip, "install", "--constraint", "constraints.txt", "--progress-bar", "off", "--no-compile"]
    names = packages()
    parts = [["--editable", "."], *(names[first::PARTS] for first in range(PARTS))]
    running = [
        subprocess.Popen([*install, "--no-deps", *part], cwd=ROOT, stderr=subprocess.DEVNULL)  # noqa: S603
        for part in parts
    ]
    try:
        statuses = [process.wait() for process in running]
    finally:
        _end(running)
    # A killed pip has a status below 0. `pip check` does not notice what only the extras need and is missing.
    check = [*pip, "check"]
    if not any(statuses) and subprocess.run(check, cwd=ROOT, stdout=subprocess.DEVNULL, check=False).returncode == 0:  # noqa: S603
        return 0
    return subprocess.run([*install, "--editable", EXTRAS], cwd=ROOT, check=False).returncode  # noqa: S603


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Wait for those that Ctrl-C has reached, too, and end the others."""
    for process in processes:
        try:
            process.wait(_LAST_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
