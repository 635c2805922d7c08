"""A diff of a few lines adds an option to an engine: its key of node.toml, validation and documentation follow."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# File, what it follows, what is added.
OPTIONS = "worker_node/tasks/generate/options.py"
DIFF = [
    (
        OPTIONS,
        '    engine: Literal["generation_continuous"] = "generation_continuous"\n',
        '    cpu_pinning: Annotated[bool, Option("bind threads to cores")] = False\n'
        '    spare_cores: Annotated[int, Ge(0), Option("cores left to others", also=("reserved_cores",))] = 0\n',
    ),
    (
        OPTIONS,
        '        """The properties for OpenVINO\'s plugin of the device."""\n',
        '        pinning = {"ENABLE_CPU_PINNING": self.cpu_pinning}\n',
    ),
    (OPTIONS, "if value} | self.plugin_config", " | pinning"),
]
PROBE = """
import sys
from dataclasses import asdict
import msgspec
from worker_node.settings import InvalidSettings, parse_settings
from worker_node.settings.options import engine_options
from worker_node.tasks.generate.options import ContinuousOptions

def read(*lines):
    return parse_settings("\\n".join(["[[models]]", 'name = "m"', *lines]), "node.toml").models[0]

given = read("cpu_pinning = true", "reserved_cores = 2").of(ContinuousOptions)
arrived = msgspec.convert(asdict(given), ContinuousOptions)
print(arrived.properties(), arrived.spare_cores, ContinuousOptions().spare_cores)
for line in ("spare_cores = -1", 'cpu_pinning = "often"', "cpu_pining = true"):
    try:
        read(line)
    except InvalidSettings as error:
        print(error.problems[0])
"""


# Some 3 s: a copy of the source tree is changed, and two processes import it.
def test_the_key_its_validation_and_its_documentation_follow_from_the_declaration(tmp_path):
    assert sum(added.count("\n") for _, _, added in DIFF) <= 20
    shutil.copytree(ROOT / "worker_node", tmp_path / "worker_node", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("docs/settings.md", "config/node.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name, after, added in DIFF:
        text = (tmp_path / name).read_text()
        assert text.count(after) == 1
        (tmp_path / name).write_text(text.replace(after, after + added))

    def run(*arguments):
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)}
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True).stdout

    assert run("-c", PROBE).splitlines() == [
        "{'ENABLE_CPU_PINNING': True} 2 0",
        "node.toml:3: models[0].spare_cores: Input should be greater than or equal to 0",
        "node.toml:3: models[0].cpu_pinning: Input should be a valid boolean, unable to interpret input",
        "node.toml:3: models[0].cpu_pining: unknown key; did you mean cpu_pinning?",
    ]
    run("-m", "worker_node.settings.reference")
    rows = [line for line in (tmp_path / "docs/settings.md").read_text().splitlines() if "spare_cores" in line]
    (row,) = rows
    assert row.startswith("| `spare_cores` |")
    assert "cores left to others" in row
