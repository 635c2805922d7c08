"""Run the suite as a CPU with AVX2 only would: `ONEDNN_MAX_CPU_ISA=AVX2 make test`; AVX2_VNNI: a laptop with an NPU.

That variable limits oneDNN alone. The rest of OpenVINO's CPU plugin asks the CPU itself (for the precision, for the
quantisation of activations, for attention), so on a CPU that has more it asks oneDNN for what is not there, and most
models fail. So the tests use a copy of OpenVINO whose detection of the CPU finds no AVX-512, AMX and AVX-VNNI.
"""

import hashlib
import os
import re
import shutil
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from tests.support.foreign import kept, kept_directory

# Xbyak, which all parts of the plugin use, and MLAS: the jump if the system does not save the registers of AVX-512, and
# the jumps over setting the flags of AVX-VNNI and AMX.
_AVX512 = rb"(\x81[\xe0-\xe7]\xe0\0\0\0)\x0f\x85", rb"\1" + b"\x90\xe9"
_VNNI = rb"\x74(.\x48\x0f\xba.\x3e)", b"\xeb" + rb"\1"
_AMX = rb"\x74(.\x48\x0f\xba.[\x3b-\x3d])", b"\xeb" + rb"\1"
_PATCHES = {"AVX2": (_AVX512, _AMX, _VNNI), "AVX2_VNNI": (_AVX512, _AMX)}
_MORE_THAN_AVX2 = {"avx512f", "avx_vnni"}


def use_if_wanted() -> None:
    """Let this process and those it starts import the copy, if ONEDNN_MAX_CPU_ISA asks for less than the CPU has."""
    isa = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    if isa not in _PATCHES or not _MORE_THAN_AVX2 & set(Path("/proc/cpuinfo").read_text().split()):
        return
    assert "openvino" not in sys.modules, "OpenVINO is imported already"
    package = Path(find_spec("openvino").origin).parent
    if package.is_relative_to(kept_directory()):
        return  # inherited from the process that started this one
    digest = hashlib.sha256(bytes(package) + Path(__file__).read_bytes()).hexdigest()[:8]
    name = f"openvino-{version('openvino')}-{isa}-{digest}"
    copy = str(kept(name, lambda directory: _make(package, directory, isa)))
    sys.path.insert(0, copy)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [copy, os.environ.get("PYTHONPATH")]))


def _make(package, directory, isa):
    shutil.copytree(package, directory / "openvino", copy_function=os.symlink)
    for name in ("libopenvino.so.*", "libopenvino_intel_cpu_plugin.so"):
        (library,) = (directory / "openvino" / "libs").glob(name)
        content = library.read_bytes()
        for pattern, replacement in _PATCHES[isa]:
            content, found = re.subn(pattern, replacement, content, flags=re.DOTALL)
            assert found, f"{library.name}: no detection of the CPU like {pattern}; adapt the patches in {__file__}"
        library.unlink()
        library.write_bytes(content)


if __name__ == "__main__":
    use_if_wanted()
    print(os.environ.get("PYTHONPATH", ""))
