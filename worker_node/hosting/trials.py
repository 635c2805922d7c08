"""Which requests may be on an engine together while the cause of a death is sought. Pure, without a clock.

Clear requests share the engine. Suspects enter in groups when no clear request is on board: a suspect whose `company`
is n shares the engine with at most n suspects of unknown effect. Suspects that have proved harmless make room for the
next ones; a group that kills the engine is divided (`suspicion.py`). The prime suspect enters an empty engine. Waiting
suspects do not interrupt running requests; one that has waited long enough to be `urgent` keeps new ones out.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from worker_node.hosting.suspicion import Standing

# Suspects first, since they have waited for a restart; the prime suspect last.
_ORDER = {Standing.SUSPECT: 0, Standing.CLEAR: 1, Standing.PRIME: 2}


@dataclass(eq=False, slots=True)
class Visit:
    """A request on the engine. `apart` until it has shown itself harmless, which is at its end if `thorough`.

    `company` is of use for suspects only, `urgent` for the prime one: it has waited for long.
    """

    standing: Standing
    company: int = 1
    thorough: bool = False
    urgent: bool = False
    apart: bool = field(init=False)

    def __post_init__(self) -> None:
        self.apart = self.standing is not Standing.CLEAR


@dataclass(slots=True)
class Trials:
    """The requests on one engine, those that wait for it, and the `coming` ones: suspects that wait for its restart."""

    inside: dict[Visit, None] = field(default_factory=dict)
    waiting: dict[Visit, None] = field(default_factory=dict)
    coming: Counter[int] = field(default_factory=Counter)
    # Those inside that are suspected, harmless or not.
    _suspects: int = 0

    @property
    def shared(self) -> bool:
        """Whether clear requests are on board."""
        return any(visit.standing is Standing.CLEAR for visit in self.inside)

    @property
    def going_on(self) -> bool:
        """Whether a suspect is tried or can be tried next."""
        if any(visit.apart for visit in self.inside):
            return True
        suspects_wait = any(visit.standing is Standing.SUSPECT for visit in self.waiting)
        return (suspects_wait or self.coming.total() > 0) and not self.shared

    def arrive(self, visit: Visit) -> bool:
        """A request comes; returns whether it enters at once, else it waits."""
        if self._may_enter(visit):
            self._enter(visit)
            return True
        self.waiting[visit] = None
        return False

    def leave(self, visit: Visit) -> None:
        """A request ends, whether it is on board or waits."""
        if visit in self.inside:
            del self.inside[visit]
            self._suspects -= visit.standing is not Standing.CLEAR
        else:
            self.waiting.pop(visit, None)

    def admit(self) -> list[Visit]:
        """Admit the requests that may enter now, and return them."""
        entered = []
        for visit in sorted(self.waiting, key=lambda visit: (_ORDER[visit.standing], -visit.company)):
            if self._may_enter(visit):
                del self.waiting[visit]
                self._enter(visit)
                entered.append(visit)
        return entered

    def _enter(self, visit: Visit) -> None:
        self.inside[visit] = None
        self._suspects += visit.standing is not Standing.CLEAR

    def _may_enter(self, visit: Visit) -> bool:
        if visit.standing is Standing.CLEAR and not (self._suspects or self.waiting or self.coming):
            return True
        if visit.standing is Standing.PRIME:
            return not self.inside
        if visit.standing is Standing.SUSPECT and visit.apart:
            return self._joins_group(visit)
        return not self.going_on and not any(other.urgent for other in self.waiting)

    def _joins_group(self, visit: Visit) -> bool:
        group = [other for other in self.inside if other.apart]
        if self.shared or any(other.standing is Standing.PRIME for other in group):
            return False
        # The larger its company may be, the less it is suspected, and the more are cleared before the next death.
        others = [other.company for other in self.waiting if other.standing is Standing.SUSPECT and other.apart]
        if any(company > visit.company for company in (*others, *+self.coming)):
            return False
        return len(group) < min([visit.company, *(other.company for other in group)])
