"""Run in Windows' Python: load a model as a node's engine on the NPU would, for a processor that is not here.

It takes `model`, `store`, `options` (of `[[models]]`), `properties` (of its placement), `platforms`, `out` and
`exported` (as `npu-node compile` does) as one JSON text, and prints a line of JSON for each platform. The engine's own
`load` compiles; OpenVINO keeps each binary in a directory of `out` and fails afterwards, since no device is there.
"""

import gc
import json
import sys
import time
from pathlib import Path

import openvino as ov

from worker_node.core.types import Device
from worker_node.devices.npu import npu_source
from worker_node.devices.probe import DeviceInfo, Probe
from worker_node.engines.child import make_runner
from worker_node.models.store import ModelStore
from worker_node.serving.build import Machine, build_model, installed_model
from worker_node.settings import ModelSettings, NodeSettings, PlacementSettings

# The last words of OpenVINO 2026.4.1 after it compiled for a device that is not there; a binary must be there, too.
NO_DEVICE = (
    "No available devices. Failed to create infer request!",
    "Level zero backend is not found!",
    "Tensor was not initialized.",
)


def main(job):
    for platform in job["platforms"]:
        print(json.dumps({"platform": platform, **compile_for(platform, job)}), flush=True)
        gc.collect()


def compile_for(platform, job):
    out = Path(job["out"]) / platform
    out.mkdir()
    spec = spec_of(platform, out, job)
    runner = make_runner(spec)
    began = time.process_time()
    try:
        runner.load()
        problem = "it was loaded, though no device is there"
    except Exception as error:  # noqa: BLE001  (whatever the compiler raises is the result)
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        problem = None if lines and lines[-1] in NO_DEVICE else " ".join(lines[-3:])
    lengths = {name: spec.options.get(name) for name in ("max_prompt_len", "prefill_hint", "prefill_chunk_size")}
    return {"cpu_s": round(time.process_time() - began, 1), "problem": problem, "engine": lengths}


def spec_of(platform, out, job):
    """What the node gives the engine of this model on its NPU."""
    settings = NodeSettings(model_store=Path(job["store"]), compile_cache=out)
    target = {"NPU_PLATFORM": platform, "NPU_COMPILER_TYPE": "PLUGIN", **job["properties"]}
    place = PlacementSettings(device=Device.NPU, load="lazy", plugin_config=target)
    wanted = ModelSettings.model_validate({"name": job["model"], "allow_known_bad": True, **job["options"]})
    wanted = wanted.model_copy(update={"placements": (place,)})
    found = Probe((DeviceInfo("NPU", {"DEVICE_ARCHITECTURE": platform}),), ov.get_version())
    with npu_source(out, emulated=False) as npu:
        installed = installed_model(wanted, ModelStore(settings.model_store), settings)
        machine = Machine(settings, found, npu, out if job["exported"] else None)
        return build_model(installed, wanted, machine).placements[0].engine.spec


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
