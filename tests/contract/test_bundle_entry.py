"""The program of the bundle takes Python's place for the node's own child processes."""

import subprocess
import sys
from pathlib import Path

ENTRY = Path(__file__).parents[2] / "packaging" / "bundle" / "entry.py"


def test_a_child_process_is_started_as_python_would_start_it(tmp_path):
    (tmp_path / "shown.py").write_text("import sys\nprint(__name__, sys.argv[1:])\n")
    done = subprocess.run(
        [sys.executable, ENTRY, "-m", "shown", "3", "x"],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "__main__ ['3', 'x']\n"), done.stderr


def test_without_a_module_it_is_the_installed_command(tmp_path):
    (tmp_path / "npu_commands.py").write_text("def node():\n    print('npu_commands was asked')\n    return 130\n")
    done = subprocess.run(
        [sys.executable, ENTRY, "--help"],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (130, "npu_commands was asked\n"), done.stderr
