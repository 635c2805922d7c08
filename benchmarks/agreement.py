"""How far a right device's answers are from the CPU's at full precision: what the bound of `npu-node certify` rests on.

    python -m benchmarks.agreement [--longest TOKENS]

SmolLM2 on the CPU at the precision that a node serves with, and on the emulated NPU, against the reference that comes
with the package, which a CPU with AVX-512 made. On another kind of CPU the same figures show what its numerics add.
"""

import argparse
from contextlib import closing

from benchmarks.quiet import describe_machine
from worker_node.certify import inputs
from worker_node.certify.checks import agreement
from worker_node.certify.nodes import RunningNode
from worker_node.certify.reference import Reference, shipped_reference
from worker_node.core.types import Device
from worker_node.models.directory import MODEL_FILE, content_hash
from worker_node.models.store import ModelStore
from worker_node.settings import ModelSettings, NodeSettings, PlacementSettings

MODEL = "smollm2-135m-instruct"


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agreement", description=__doc__)
    parser.add_argument("--longest", type=int, default=1024, metavar="TOKENS")
    longest = parser.parse_args().longest
    import openvino as ov

    print(describe_machine())
    directory = ModelStore().get(MODEL).path
    key = f"{content_hash(directory)} {ov.get_version()}"
    stored = shipped_reference(MODEL, key)
    lengths = [length for length in inputs.LENGTHS if length < longest] + [longest]
    for device in (Device.CPU, Device.NPU):
        settings = NodeSettings(npu_emulation=device is Device.NPU)
        with (
            closing(Reference(key, None, directory / MODEL_FILE, stored)) as reference,
            closing(RunningNode(ModelSettings(name=MODEL), PlacementSettings(device=device), settings, print)) as node,
        ):
            found = [agreement(node, reference, length, logprobs=device is Device.CPU) for length in lengths]
            errors = [each.logprob_error for each in found if each.logprob_error is not None]
            equal = sum(not each.margin for each in found)
            print(
                f"{device} ({reference.origin}): {equal} of {len(found)} answers are equal, largest margin where the "
                f"others part {max(each.margin for each in found):.3f}, largest error of a log probability "
                f"{max(errors, default=float('nan')):.3f}"
            )


if __name__ == "__main__":
    main()
