"""When the results of a job end by their deadline."""

import asyncio
import math
from types import SimpleNamespace

import pytest

from tests.unit.worker_node.manager.jumping import run_jumping
from worker_node.core.errors import DeadlineExceeded
from worker_node.engines import process
from worker_node.engines.process import JobResults

DEADLINE, LATER = 1050.0, 1100.0


@pytest.mark.parametrize(
    ("begins", "ends", "cancelled"),
    [(False, math.inf, DEADLINE), (True, DEADLINE, DEADLINE), (True, LATER, LATER), (True, math.inf, None)],
)
def test_results_that_have_begun_go_on_until_they_must_end(monkeypatch, begins, ends, cancelled):
    seen = []

    async def scenario():
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(process.time, "monotonic", loop.time)
        job = SimpleNamespace(id=7, deadline=DEADLINE, ends=ends)
        edge = SimpleNamespace(cancel=lambda number: seen.append((number, loop.time())))
        results = JobResults(edge, job, int, suspect=False)
        if begins:
            results.coming.set_result(1)
            results.coming = loop.create_future()
        await asyncio.sleep(1000)
        if cancelled is not None:
            with pytest.raises(DeadlineExceeded):
                await results.coming
        assert [(number, pytest.approx(at)) for number, at in seen] == ([] if cancelled is None else [(7, cancelled)])

    run_jumping(scenario)
