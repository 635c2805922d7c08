"""Run a scenario in virtual time and check the invariants. An invariant names what a caller may rely on."""

import asyncio
import itertools
import logging
import random
import time
import zlib
from collections import Counter
from dataclasses import dataclass, field
from unittest import mock

from backend_client import ClientOptions, NPUClient, NPUError, StreamInterrupted
from backend_client.errors import EmbedManyFailed, SpaceChanged
from tests.unit.backend_client.simulation.nodes import (
    ALIAS,
    EMBEDDER,
    OTHER,
    SPACES,
    SimNode,
    SimTransport,
    answer,
    vector,
)
from tests.unit.backend_client.simulation.scenario import FAULTS, KILLED, draw
from tests.unit.backend_client.virtual_time import VirtualLoop

OVERRUN_S = 0.050
NO_TRAFFIC_S = 5.0


@dataclass
class Outcome:
    """What a scenario showed. `ends` counts how the calls ended."""

    violations: list = field(default_factory=list)
    ends: Counter = field(default_factory=Counter)


class _ErrorLog(logging.Handler):
    def __init__(self):
        super().__init__(logging.ERROR)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def simulate(seed):
    outcome = Outcome()
    errors = _ErrorLog()
    loggers = [logging.getLogger("backend_client"), logging.getLogger("asyncio")]
    before = [(log, log.level, log.propagate) for log in loggers]
    for log in loggers:
        log.addHandler(errors)
        log.setLevel(logging.ERROR)
        log.propagate = False
    try:
        with (
            asyncio.Runner(loop_factory=VirtualLoop) as runner,
            mock.patch.object(time, "monotonic", runner.get_loop().time),
        ):
            try:
                runner.run(_Run(draw(seed), outcome).play())
            except Exception as error:  # noqa: BLE001  (a scenario that cannot be played is a violation)
                outcome.violations.append(f"the scenario broke off: {error!r}")
    finally:
        for log, level, propagate in before:
            log.removeHandler(errors)
            log.setLevel(level)
            log.propagate = propagate
    outcome.violations += [f"logged: {line}" for line in errors.lines]
    return outcome


class _Run:
    def __init__(self, scenario, outcome):
        self.scenario = scenario
        self.outcome = outcome
        self.spaces = {}
        self.steady = []

    async def play(self):
        scenario, loop = self.scenario, asyncio.get_running_loop()
        self.zero = loop.time()
        rng = random.Random(scenario.seed + 1)
        self.nodes = [
            SimNode(f"http://node-{index}:8081", random.Random(rng.random()), **node)
            for index, node in enumerate(scenario.nodes)
        ]
        self.transport = SimTransport(self.nodes)
        options = ClientOptions()
        self.client = NPUClient(
            [node.url for node in self.nodes],
            transport=lambda: self.transport,
            clock=loop.time,
            rng=random.Random(rng.random()),
            options=options,
        )
        # A client that is closed forgets what it knew of them.
        self.known = list(self.client.fleet.runtime.pool.nodes.values())
        self.options = options
        self._count_changed_spaces()
        self.closed_at = None
        tasks = [asyncio.create_task(self._fault(fault)) for fault in scenario.faults]
        if scenario.close_at is not None:
            tasks.append(asyncio.create_task(self._close(scenario.close_at)))
        calls = [asyncio.create_task(self._call(call)) for call in scenario.calls]
        await asyncio.gather(*calls)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        ended = loop.time()
        await self.client.close()
        self._check_leaks()
        self._check_budget(ended)
        self._check_traffic()

    def _count_changed_spaces(self):
        """The client alone knows that a node answered in another space than the one that is bound."""
        bindings = self.client.fleet.runtime.bindings
        check = bindings.check

        def counted(*args, **answer):
            try:
                check(*args, **answer)
            except SpaceChanged:
                self.transport.misrouted += 1
                raise

        bindings.check = counted

    def violated(self, what):
        self.outcome.violations.append(what)

    def now(self):
        return asyncio.get_running_loop().time() - self.zero

    async def _fault(self, fault):
        node = self.nodes[fault.node]
        await asyncio.sleep(max(0.0, fault.start - self.now()))
        if fault.kind == "another space":
            node.models[EMBEDDER]["space"] = SPACES[3]
        elif fault.kind == "another alias":
            node.alias = OTHER if node.alias == EMBEDDER and OTHER in node.models else EMBEDDER
        else:
            node.set(fault.kind)
            await asyncio.sleep(max(0.0, fault.end - self.now()))
            node.set(None)

    async def _close(self, at):
        await asyncio.sleep(at)
        self.closed_at = self.now()
        await self.client.close()
        if self.now() - self.closed_at > OVERRUN_S:
            self.violated(f"closing took {self.now() - self.closed_at:.3f} s")

    async def _call(self, call):
        await asyncio.sleep(max(0.0, call.at))
        work = asyncio.ensure_future(self._send(call))
        if call.leaves_after is not None:
            asyncio.get_running_loop().call_later(call.leaves_after, work.cancel)
        began = self.now()
        try:
            await work
            end = "ok"
        except NPUError as error:
            end = type(error).__name__
            self._check_partial(call, error)
        except asyncio.CancelledError:
            end = "left"
            if call.leaves_after is None:
                self.violated(f"{call.kind} at {call.at:.3f} was cancelled, and nobody asked for it")
        except Exception as error:  # noqa: BLE001  (whatever is not ours is a violation)
            end = "foreign"
            self.violated(f"{call.kind} at {call.at:.3f} raised {error!r}")
        self.outcome.ends[end] += 1
        limit = began + call.timeout
        if self.closed_at is not None:
            limit = min(limit, max(self.closed_at, began))
        if self.now() > limit + OVERRUN_S:
            self.violated(f"{call.kind} at {call.at:.3f} ended {self.now() - limit:.3f} s too late with {end}")
        self._check_available(call, end, began)
        self._check_restart(call, end, began)
        if call.texts[0].startswith("steady"):
            self.steady.append(began)

    async def _send(self, call):
        # Half of the prompts are turns of a few conversations.
        session = zlib.crc32(call.texts[0].encode()) % 16
        headers = {"X-Session-Id": str(session)} if session < 8 else None
        common = {"timeout": call.timeout, "model": call.model, "extra_headers": headers}
        if call.kind == "embed":
            result = await self.client.embed_result(call.texts[0], **common)
            self._check_rows(call, [result.vector], result.space)
        elif call.kind == "embed_many":
            result = await self.client.embed_many_result(list(call.texts), **common)
            self._check_rows(call, result.vectors, result.space)
        elif call.kind == "generate":
            text = (await self.client.generate(call.texts[0], **common)).text
            if text != "".join(answer(call.texts[0])):
                self.violated(f"generate at {call.at:.3f} answered {text!r}")
        else:
            pieces = [piece async for piece in self.client.stream(call.texts[0], **common)]
            if pieces != answer(call.texts[0]):
                self.violated(f"stream at {call.at:.3f} answered {pieces}")

    def _check_rows(self, call, rows, space):
        """The right vector for each text, all of one space, which is that of every other answer for this name."""
        expected = [vector(text, space) for text in call.texts]
        if len(rows) != len(expected) or any(
            list(map(float, row)) != want for row, want in zip(rows, expected, strict=False)
        ):
            self.violated(f"{call.kind} at {call.at:.3f} for {call.model} mixed or wrong vectors in {space}")
        bound = self.spaces.setdefault(call.model, space)
        if bound != space:
            self.violated(f"{call.kind} at {call.at:.3f}: {call.model} was in {bound} and is in {space}")

    def _check_partial(self, call, error):
        if isinstance(error, StreamInterrupted) and not "".join(answer(call.texts[0])).startswith(error.partial_text):
            self.violated(f"the partial text of {call.kind} at {call.at:.3f} is {error.partial_text!r}")
        if isinstance(error, EmbedManyFailed) and error.vectors is not None:
            present = ~(error.vectors != error.vectors).any(axis=1)
            spaces = {SPACES[int(row[1])] for row in error.vectors[present]}
            if len(spaces) > 1:
                self.violated(f"embed_many at {call.at:.3f} failed with rows of {sorted(spaces)}")

    def _sick(self, node, start, end, *, grace=True):
        """Whether anything ailed the node between two times, or shortly before."""
        # A timer may fire up to the clock's resolution early.
        end += 1e-6
        return any(
            fault.node == node and fault.start <= end and fault.end + (FAULTS[fault.kind] if grace else 0) >= start
            for fault in self.scenario.faults
        )

    def _check_available(self, call, end, began):
        """A fleet that was healthy all along answers every call that leaves it the time."""
        nodes = range(len(self.nodes))
        healthy = not any(self._sick(node, began, self.now()) for node in nodes)
        patient = call.timeout >= 2.0 and call.leaves_after is None and self.closed_at is None
        one_space = len({node["spaces"][EMBEDDER] for node in self.scenario.nodes}) == 1
        if healthy and patient and one_space and call.model not in {None, ALIAS} and end != "ok":
            self.violated(
                f"{call.kind} at {call.at:.3f} for {call.model} ended with {end} though every node was healthy"
            )

    def _check_restart(self, call, end, began):
        """A generation that leaves the time for the restart of the engines, and for a retry, outlives their death."""
        faults = self.scenario.faults
        if call.kind != "generate" or call.leaves_after is not None or {fault.kind for fault in faults} != {KILLED}:
            return
        back = max(fault.end for fault in faults)
        # Each of them may need a retry, and the budget brings in at least one a second.
        written = sum(other.kind in {"generate", "stream"} and other.at <= back for other in self.scenario.calls)
        if began <= back and call.timeout / 2 >= back - began + written + 2 and end != "ok":
            self.violated(f"generate at {call.at:.3f} ended with {end} though engines restarted at {back:.3f}")

    def _check_leaks(self):
        left = {task.get_name() for task in asyncio.all_tasks() - {asyncio.current_task()}}
        if left:
            self.violated(f"tasks are left: {sorted(left)}")
        if self.transport.under_way:
            self.violated(f"{self.transport.under_way} requests are still under way")
        if self.transport.sent and not self.transport.closed:
            self.violated("the transport was not closed")
        for node in self.known:
            if in_flight := node.outstanding.total():
                self.violated(f"{node.url} has {in_flight} in flight")

    def _check_budget(self, ended):
        retry = self.options.retry
        batches = sum(-(-len(call.texts) // self.options.batch.texts) for call in self.scenario.calls)
        requests = Counter(request_id for _, _, request_id in self.transport.sent)
        # Retries of what a node cannot serve, or not before it has loaded the model, are free: it is not asked again.
        extra = sum(count - 1 for count in requests.values()) - self.transport.misrouted
        allowed = retry.initial + retry.per_request * batches + retry.per_second * (ended - self.zero)
        if extra > allowed + 1e-6:
            self.violated(f"{extra} retries where {allowed:.1f} are allowed")
        most = retry.attempts
        if requests and max(requests.values()) > most:
            self.violated(f"a call sent {max(requests.values())} requests")

    def _check_traffic(self):
        """No healthy node goes without a request for 5 s of load."""
        for index, node in enumerate(self.nodes):
            asked = [at - self.zero for at, url, _ in self.transport.sent if url == node.url]
            end = self.scenario.duration if self.closed_at is None else self.closed_at
            marks = [0.0, *asked, end]
            for silent, stop in itertools.pairwise(marks):
                for step in range(int(max(0.0, stop - silent - NO_TRAFFIC_S) / 0.25)):
                    start = silent + step * 0.25
                    window = start, start + NO_TRAFFIC_S
                    load = sum(window[0] <= at <= window[1] for at in self.steady)
                    if load >= 20 * len(self.nodes) and not self._sick(index, *window) and self._bound_here(node):
                        self.violated(f"{node.url} was healthy and got no request from {start:.2f} to {stop:.2f} s")
                        break

    def _bound_here(self, node):
        bound = self.spaces.get(EMBEDDER)
        return bound is not None and node.models[EMBEDDER]["space"] == bound
