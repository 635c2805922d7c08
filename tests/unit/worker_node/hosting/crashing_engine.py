"""One engine in virtual time whose requests may be poisonous, and requests that are run again as `serving.rerun` does.

The oracle is the poison itself: which sets of requests end the engine when all of a set are on board and the first
result of one of them is due; those in `breaking_late` end it in the middle of their answer, those in `breaking_at_once`
when the engine takes them. A step goes on to its end with requests whose callers have left or whose deadlines have
passed meanwhile, and they may end the engine in it, as in `hosting.held`.
"""

import heapq
import itertools
from dataclasses import dataclass, field

from worker_node.engines.isolation import OnBoard, Standing, Suspects, Trials, Visit
from worker_node.serving.run import MAX_RUNS, MOST_BEGUN

PATIENCE_S, URGENT_S, ALONE_S = 2.0, 5.0, 10.0
CRASH_LIMIT = 3


@dataclass(eq=False)
class Request:
    """Its first result takes `prefill_s` of the engine's time, the rest `decode_s` beside the others."""

    key: bytes
    arrives: float
    deadline: float
    prefill_s: float
    decode_s: float
    visit: Visit | None = None
    fresh: bool = True
    generation: int = 0
    runs: int = 0
    begun: int = 0
    outcome: str | None = None
    ended: float | None = None
    deaths_alone: int = 0


@dataclass
class World:
    """`poison` are sets of keys. `announced`: the engine tells which requests it works on, `batch` at once."""

    requests: list
    poison: list
    restart_s: float = 5.0
    announced: bool = False
    batch: int = 1
    breaking_late: frozenset = frozenset()
    breaking_at_once: frozenset = frozenset()
    now: float = 0.0
    deaths: list = field(default_factory=list)
    crashes: int = 0
    most_crashes: int = 0
    up: bool = True
    busy: bool = False

    def __post_init__(self):
        self.suspects = Suspects(clock=lambda: self.now, memory_s=1e9)
        self.trials = Trials()
        self._events, self._order = [], itertools.count()
        self.board, self.to_prefill, self.coming, self.visitors = {}, [], {}, {}
        for request in self.requests:
            self.at(request.arrives, self.arrive, request)
            self.at(request.deadline, self.late, request)

    def at(self, when, do, *arguments):
        heapq.heappush(self._events, (max(when, self.now), next(self._order), do, arguments))

    def run(self):
        while self._events:
            self.now, _, do, arguments = heapq.heappop(self._events)
            do(*arguments)
        return self

    def arrive(self, request):
        if request.outcome is None:
            if not self.up:
                # As `Runs.again` reserves: only a suspect lets those that were not on board wait for it.
                standing = self.suspects.standing(request.key)
                company = self.suspects.company(request.key) if standing is not Standing.CLEAR else None
                self.coming[request] = company
                if company is not None:
                    self.trials.coming[company] += 1
                return
            standing = self.suspects.standing(request.key)
            if standing is Standing.REFUSED:
                self.end(request, "refused")
                return
            request.visit = Visit(standing, self.suspects.company(request.key), self.suspects.thorough(request.key))
            self.visitors[request.visit] = request
            if self.trials.arrive(request.visit):
                self.enter(request)
            elif standing is Standing.SUSPECT:
                self.at(self.now + PATIENCE_S, self.lose_patience, request, request.visit)
            elif standing is Standing.PRIME:
                self.at(self.now + URGENT_S, self.urge, request.visit)

    def lose_patience(self, request, visit):
        if request.visit is visit and visit in self.trials.waiting and self.trials.shared:
            visit.apart = False
            self.admit()

    def urge(self, visit):
        visit.urgent = visit in self.trials.waiting

    def admit(self):
        for visit in self.trials.admit():
            self.enter(self.visitors[visit])

    def enter(self, request):
        request.runs += 1
        request.fresh = True
        request.generation += 1
        self.board[request] = None
        self.to_prefill.append(request)
        if request.key in self.breaking_at_once:
            self.at(self.now, self.begin, request, request.generation)
        self.work()

    def begin(self, request, generation):
        if request in self.board and request.generation == generation:
            self.die([request])

    def work(self):
        if not self.busy and self.to_prefill:
            self.busy = True
            step, self.to_prefill = self.to_prefill[: self.batch], self.to_prefill[self.batch :]
            self.at(self.now + max(r.prefill_s for r in step), self.prefilled, step, len(self.deaths))

    def prefilled(self, step, life):
        if life != len(self.deaths):
            return
        self.busy = False
        left = [request for request in step if request not in self.board]
        board = {request.key for request in (*self.board, *left)}
        if any(keys <= board and any(request.key in keys for request in step) for keys in self.poison):
            self.die(step, left)
            return
        step = [request for request in step if request in self.board]
        for request in step:
            request.fresh = False
            visit = request.visit
            if not visit.thorough:
                if visit.standing is Standing.PRIME:
                    self.at(self.now + ALONE_S, self.release, visit)
                else:
                    self.release(visit)
            if request.key in self.breaking_late:
                self.at(self.now + request.decode_s / 2, self.breaks, request, request.generation)
            self.at(self.now + request.decode_s, self.decoded, request, request.generation)
        self.work()

    def release(self, visit):
        visit.apart = False
        self.admit()

    def decoded(self, request, generation):
        if request in self.board and request.generation == generation and not request.fresh:
            self.suspects.answered(request.key)
            self.end(request, "answered")

    def breaks(self, request, generation):
        if request in self.board and request.generation == generation and not request.fresh:
            self.die([other for other in self.board if not other.fresh])

    def end(self, request, outcome):
        request.outcome, request.ended = outcome, self.now
        self.board.pop(request, None)
        if request in self.to_prefill:
            self.to_prefill.remove(request)
        company = self.coming.pop(request, None)
        if company is not None:
            self.trials.coming[company] -= 1
        if request.visit is not None:
            self.trials.leave(request.visit)
            self.admit()

    def late(self, request):
        if request.outcome is None:
            self.end(request, "late")

    def die(self, step, left=()):
        board, self.board, self.to_prefill = list(self.board), {}, []
        self.busy, self.up = False, False
        self.deaths.append([request.key for request in (*board, *left)])
        alone = step if self.announced and step else [*board, *left]
        if len(alone) == 1:
            alone[0].deaths_alone += 1
        held = [OnBoard(request.key, request.fresh) for request in (*board, *left)]
        blamed = self.suspects.died(held, [request.key for request in step] if self.announced else ())
        self.crashes = max(0, self.crashes - blamed.pardons) + (not blamed)
        self.most_crashes = max(self.most_crashes, self.crashes)
        # As after its death each call leaves the engine, and finds out how it is run next.
        for request in board:
            self.trials.leave(request.visit)
            request.visit = None
            request.begun += not request.fresh
        for request in board:
            if self.suspects.standing(request.key) is Standing.REFUSED:
                self.end(request, "refused")
            elif request.runs >= MAX_RUNS or request.begun >= MOST_BEGUN:
                self.end(request, "gave up")
            else:
                self.arrive(request)
        self.at(self.now + self.restart_s, self.restarted)

    def restarted(self):
        self.up = True
        waiting, self.coming = list(self.coming.items()), {}
        # One after another, in any order, and each lets go what it had reserved when it comes.
        for request, company in waiting:
            if company is not None:
                self.trials.coming[company] -= 1
            self.arrive(request)
        self.admit()
