"""`ONEDNN_MAX_CPU_ISA=AVX2 make test` computes as a CPU without AVX-512 does."""

import os
import subprocess
import sys

import pytest

# In processes of their own: this one has loaded OpenVINO. The second inherits it, as the tests' nodes and engines do.
SCRIPT = """
import os, subprocess, sys
from tests.support.avx2 import use_if_wanted
use_if_wanted()
if len(sys.argv) > 1:
    sys.exit(subprocess.run([sys.executable, "-c", sys.argv[1]]).returncode)
import numpy as np
import openvino as ov
from openvino import opset13 as op
rows = op.parameter([-1, 256], np.float32)
normal = op.mvn(rows, op.constant(np.int64([1])), True, 1e-6, "inside_sqrt")
model = ov.Model([op.softmax(op.tanh(normal), -1)], [rows], "rows")
core = ov.Core()
print(core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"))
for node in core.compile_model(model, "CPU").get_runtime_model().get_ops():
    print(node.get_rt_info()["primitiveType"].astype(str))
"""


@pytest.mark.parametrize("isa", ["AVX2", "AVX2_VNNI"])
@pytest.mark.parametrize("arguments", [[], [SCRIPT]], ids=["itself", "child"])
def test_openvino_uses_what_such_a_cpu_has(isa, arguments):
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": isa}
    printed = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert "jit_avx2_f32" in printed
    assert "avx512" not in printed
    assert "BF16" not in printed
