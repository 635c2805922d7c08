"""The path of a request."""

import time

from counting_task.messages import Counted, CountJob
from counting_task.serving.building import CountingModel
from counting_task.task import KIND
from worker_node.core.errors import ContextLengthExceeded
from worker_node.core.types import RequestContext, Route, Usage
from worker_node.scheduling.admission import TokenCost
from worker_node.serving.routing import Demand, reject_if_full
from worker_node.serving.run import SingleRun, run_single


class CountingMetrics:
    """What only this task counts."""

    unit = "letters"

    def __init__(self, registry):
        from prometheus_client import Counter

        counter = Counter("npu_node_counted_letters", "Letters counted", ("model", "device"), registry=registry)
        self.made = self.letters = counter


async def count(services, context: RequestContext, texts: list[str], name: str | None) -> tuple[Counted, Route]:
    """Count the vowels of texts; a character is a token."""
    with services.tracing.operation("count", {"npu.texts": len(texts)}) as operation:
        began = time.monotonic()
        model = await services.manager.model_of(KIND, CountingModel, name, context.deadline)
        with model.activity.working():
            reject_if_full(model.placements, len(texts), context)
            longest = max(map(len, texts), default=0)
            if longest > model.installed.context_limit:
                raise ContextLengthExceeded(f"a text has {longest} letters; at most 64 are counted", param="texts")
            letters = sum(map(len, texts))
            operation.begin("route")
            demand = Demand(model.id, model.placements, longest, letters, require=context.require_device)
            job = CountJob(0, texts, context.deadline, context.interactive)
            run = SingleRun(
                demand, context, job, Counted, len(texts), lambda _limits: TokenCost(letters), began, time.monotonic()
            )
            answer = await run_single(services, run, operation)
        result, route, usage = answer.result, answer.route, Usage(letters)
        operation.answered(usage, busy=result.busy)
        services.telemetry.finished(route, usage, answer.timing, busy=result.busy)
        services.telemetry.own(CountingMetrics).letters.labels(route.model, route.device.value).inc(letters)
        return result, route
