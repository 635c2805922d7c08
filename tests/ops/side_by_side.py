"""How pytest-xdist spreads these tests over its workers: files that share machines as one, and those first."""

import functools
import re
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

# Fixtures of machines, and of the chart on a control plane, what takes longest first. Each is set up once, on the
# worker that runs all who use it.
MACHINES = ("fleet", "hardware", "release")


@functools.cache
def unit_of(path):
    """What runs as a whole on one worker: a file, or all files of which a test or fixture takes these machines."""
    source = Path(path).read_text(encoding="utf-8")
    taken = (name for name in MACHINES if re.search(rf"^def \w+\([^)]*\b{name}\b", source, re.MULTILINE))
    return next(taken, path)


class MachinesFirst(LoadScopeScheduling):
    """Hands out units: machines, then files."""

    def _split_scope(self, nodeid):
        return unit_of(nodeid.split("::")[0])

    def _assign_work_unit(self, node):
        first = min(self.workqueue, key=lambda unit: (unit not in MACHINES, unit))
        self.workqueue.move_to_end(first, last=False)
        super()._assign_work_unit(node)
