"""An engine that answers without errors and without sense, for canary tests only.

Options: `after`, the number of jobs that it echoes rightly before it begins to; `lost`: it loses its device instead.
"""

import numpy as np

from tests.support.scripted_runner import ScriptedRunner
from worker_node.engines.protocol import DeviceBroken

GARBAGE = 1


class GarbageRunner(ScriptedRunner):
    def submit(self, job):
        self._seen = getattr(self, "_seen", 0) + 1
        super().submit(job)
        if self._seen > self._options.get("after", 0):
            if self._options.get("lost"):
                raise DeviceBroken("the NPU failed in a generation: DEVICE_LOST")
            _, tokens = self._running[job.id]
            self._running[job.id] = (job, np.full(len(tokens), GARBAGE).tolist())
