"""How the task's models are planned, opened and examined."""

import json
import time
from contextlib import aclosing
from dataclasses import dataclass

from counting_task.messages import Counted, CountJob
from worker_node.core.types import Device
from worker_node.engines.process import CANARY_TIMEOUT_S, CanaryFailed
from worker_node.manager.served import ServedModel
from worker_node.scheduling.admission import AdmissionLimits
from worker_node.serving.task import EnginePlan, ServedTask


@dataclass(eq=False, slots=True)
class CountingModel(ServedModel):
    """A served model; it counts these letters."""

    vowels: str

    def facts(self):
        return {"vowels": self.vowels}


class _Counting(ServedTask):
    """Units at admission are texts."""

    def plan(self, given, target):
        limit = target.installed.context_limit
        return EnginePlan(
            options=given,
            admission=AdmissionLimits(64, parallel=given.parallel_texts),
            prompt_limit=limit,
            total_limit=limit,
            memory=target.footprint(),
            lengths=(limit,) if target.device is Device.NPU else (),
        )

    def open(self, installed, wanted, settings):
        return CountingModel(installed, json.loads((installed.path / "vowels.json").read_text())["vowels"])

    def canary(self, model, wanted, plan):
        known = json.loads((model.installed.path / "vowels.json").read_text())["canary"]

        async def examine(engine):
            job = CountJob(0, [known["text"]], time.monotonic() + CANARY_TIMEOUT_S)
            async with aclosing(engine.run(job, Counted)) as results:
                found = (await anext(results)).counts
            if found != [known["count"]]:
                raise CanaryFailed(f"counted {found}, and {known['count']} is right")

        return examine


COUNTING = _Counting()
