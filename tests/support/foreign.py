"""Clients and test suites of others: what they need is fetched once and kept, and their results are counted."""

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest

from worker_node.core.operating_system import lock

INSTALL_LIMIT_S = 400
ATTEMPTS = 3
RUN_LIMIT_S = 600


def kept(name: str, make: Callable[[Path], None], recipe: str = "") -> Path:
    """The directory `name` of the cache, made by `make` if it is not there; the test does not run if that fails.

    `recipe` is what its content is made of: another recipe makes another directory.
    """
    digest = hashlib.sha256(recipe.encode()).hexdigest()[:12]
    directory = kept_directory() / (f"{name}-{digest}" if recipe else name)
    finished = directory / "finished"
    with _lock(directory.with_name(f"{name}.lock")):
        if not finished.exists():
            _make(directory, make)
            finished.touch()
    return directory


def kept_directory() -> Path:
    """Where `kept` has its directories."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "npu-node" / "test-environments"


def _make(directory, make):
    for left in reversed(range(ATTEMPTS)):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        try:
            return make(directory)
        except AssertionError:  # of tests.ops, where the recipe is our own
            if not left:
                raise
        except subprocess.CalledProcessError as error:  # an index may be busy, or a download break off
            reason = error.stderr or error
        except subprocess.TimeoutExpired as error:
            reason = error.stderr or error
            break
    return pytest.skip(f"NOT RUN: {directory.name} could not be installed: {reason}"[:500])


@contextlib.contextmanager
def _lock(path):
    """Only one worker, of any run, is inside the block: the others wait for what it makes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        lock(file)
        yield


def key_of(wanted: Path, platform: str) -> str:
    """What names an installation: by the content of the file that says what is wanted, and on what."""
    return hashlib.sha256(wanted.read_bytes() + platform.encode()).hexdigest()[:16]


def environment(requirements: Path) -> Path:
    """The interpreter of an environment with these requirements, one for each content of the file."""

    def make(directory):
        venv.create(directory)
        # Compiling all that is installed takes longer than installing it, and little of it is ever imported.
        options = ("--no-compile", "--no-deps", "--requirement", requirements)
        pip(sys.executable, "--python", directory, "install", *options)

    return kept(f"{requirements.stem}-{key_of(requirements, sys.version)}", make) / "bin" / "python"


def npm_packages(wanted: Path) -> Path:
    """A directory with the packages that a package.json names. A script finds them when it is in there."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("NOT RUN: the npm clients need node and npm, which this machine lacks")

    def make(directory):
        shutil.copy(wanted, directory)
        install = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error"]
        subprocess.run(install, cwd=directory, check=True, capture_output=True, text=True, timeout=INSTALL_LIMIT_S)

    return kept(f"npm-{key_of(wanted, 'node')}", make)


def pip(python: Path | str, *arguments: Path | str) -> None:
    """Run pip. Raises CalledProcessError, TimeoutExpired."""
    command = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_LIMIT_S)


def output_of(*command: Path | str, directory: Path | None = None, **env: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=directory,
        env=os.environ | {"HF_HUB_OFFLINE": "1"} | env,
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


@dataclass(frozen=True)
class Outcome:
    """How a suite went; `told` is the end of what it printed."""

    passed: int
    failed: int
    skipped: int
    deselected: int
    told: str


def run_suite(
    python: Path | str, paths: list[str], root: Path, report: Path, *, deselected: list[str], settings: list[str], **env
) -> Outcome:
    """Run the tests at `paths` below `root` with pytest, by its own rules alone, and count how they ended.

    `deselected` are beginnings of node ids; `settings` are pytest's, as `name=value`.
    """
    command = [python, "-m", "pytest", "-q", "-rsf", "--tb=short", "-p", "no:cacheprovider", "-c", os.devnull]
    command += ["--rootdir", root, "--confcutdir", root, f"--junitxml={report}", *paths]
    command += [f"--deselect={node_id}" for node_id in deselected]
    command += [part for setting in settings for part in ("-o", setting)]
    done = subprocess.run(
        [str(part) for part in command],
        cwd=root,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT_S,
        check=False,
    )
    told = done.stdout[-8000:] + done.stderr[-2000:]
    assert report.exists(), told
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")  # noqa: S314  (made by the line above)
    total, failures, errors, skipped = (int(suite.get(key)) for key in ("tests", "failures", "errors", "skipped"))
    left_out = re.search(r"(\d+) deselected", done.stdout)
    return Outcome(
        passed=total - failures - errors - skipped,
        failed=failures + errors,
        skipped=skipped,
        deselected=int(left_out[1]) if left_out else 0,
        told=told,
    )
