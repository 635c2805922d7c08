"""How the task's models are built, examined and admitted."""

import json
import time
from contextlib import aclosing
from dataclasses import dataclass

from counting_task.messages import Counted, CountJob
from worker_node.engines.process import CANARY_TIMEOUT_S, CanaryFailed
from worker_node.manager.served import ServedModel
from worker_node.scheduling.admission import AdmissionLimits
from worker_node.serving.task import ServedTask


@dataclass(frozen=True, slots=True)
class CountingModel(ServedModel):
    """A served model; it counts these letters."""

    vowels: str

    def facts(self):
        return {"vowels": self.vowels}


class _Counting(ServedTask):
    def build(self, parts):
        model = json.loads((parts.installed.path / "vowels.json").read_text())
        known = model["canary"]

        async def canary(engine):
            job = CountJob(0, [known["text"]], time.monotonic() + CANARY_TIMEOUT_S)
            async with aclosing(engine.run(job, Counted)) as results:
                found = (await anext(results)).counts
            if found != [known["count"]]:
                raise CanaryFailed(f"counted {found}, and {known['count']} is right")

        return CountingModel(
            parts.installed,
            parts.place(lambda _limit: canary),
            model["vowels"],
            aliases=parts.wanted.aliases,
            idle_unload_s=parts.wanted.idle_unload_s,
        )

    def admission(self, options):
        """Units are texts."""
        return AdmissionLimits(64, parallel=options.parallel_texts)


COUNTING = _Counting()
