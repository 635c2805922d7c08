"""The faults of one seed: pure data, so that a seed always gives the same schedule."""

import random
from dataclasses import dataclass

NODES = 3
# What a fault needs to be over and noticed before the next one strikes the same node: restart, probes.
RECOVERY_S = 12.0
WARM_UP_S = 5.0


@dataclass(frozen=True)
class Fault:
    """`kind` strikes `node` (None: the caller's own process) at `at` seconds and lasts `seconds`.

    `detail` is what the kind needs to know: a model, a number of bytes, a delay.
    """

    at: float
    seconds: float
    kind: str
    node: int | None
    detail: object = None

    @property
    def until(self):
        return self.at + self.seconds

    def __str__(self):
        where = "caller" if self.node is None else f"node {self.node}"
        detail = "" if self.detail is None else f" ({self.detail})"
        return f"{self.at:6.1f} s {where}: {self.kind}{detail} for {self.seconds:.1f} s"


MODELS = ("all-minilm-l6-v2", "smollm2-135m-instruct", "tiny-ranker")

# kind -> (how many of it are in a deck, shortest, longest duration in seconds, how its detail is drawn)
NODE_FAULTS = {
    "engine_kill": (2, 0.1, 0.1, lambda rng: rng.choice(MODELS)),
    "engine_hang": (1, 2.0, 20.0, lambda rng: rng.choice(MODELS)),
    "node_freeze": (1, 1.0, 12.0, None),
    "node_kill": (1, 0.5, 5.0, None),
    "node_restart": (1, 0.5, 0.5, None),
    "alias_change": (1, 0.5, 0.5, None),
    "model_withdrawn": (1, 0.5, 5.0, lambda rng: rng.choice(["removed", *MODELS])),
    "settings_reload": (1, 1.5, 3.0, lambda rng: rng.choice(["file", "signal", "request"])),
    "slow_replies": (1, 2.0, 10.0, lambda rng: rng.choice([0.1, 0.5, 2.0])),
    "cut_replies": (1, 1.0, 6.0, lambda rng: rng.choice([0, 1, 17, 200, 2000])),
    "silent_network": (1, 1.0, 8.0, None),
    "refused_connections": (1, 1.0, 8.0, None),
    "full_disk": (1, 5.0, 15.0, lambda rng: rng.choice(MODELS)),
    "damaged_store": (1, 5.0, 15.0, lambda rng: rng.choice(["truncated", "garbage", "missing"])),
    "damaged_weights": (1, 5.0, 10.0, None),
}
CALLER_FAULTS = {
    "frozen_resolver": (2, 2.0, 10.0, None),
    "event_loop_stall": (2, 0.2, 1.5, None),
    "full_pools": (2, 1.0, 1.0, None),
}


def schedule(seed, seconds):
    """The faults of a run of that many seconds, in order of time. Faults overlap, but never on one node, and the last
    one leaves time to recover.
    """
    rng = random.Random(seed)
    faults, at = [], WARM_UP_S
    free_at = dict.fromkeys([*range(NODES), None], 0.0)
    decks = {kinds: [] for kinds in ("node", "caller")}
    while at < seconds - RECOVERY_S:
        node = rng.choice([*range(NODES), None])
        kinds, deck = (CALLER_FAULTS, decks["caller"]) if node is None else (NODE_FAULTS, decks["node"])
        if not deck:
            # Drawn from a shuffled deck, so that three minutes have every kind.
            deck += [kind for kind, (count, *_) in kinds.items() for _ in range(count)]
            rng.shuffle(deck)
        _, shortest, longest, draw = kinds[deck[-1]]
        lasting = round(rng.uniform(shortest, longest), 2)
        detail = draw(rng) if draw else None
        if free_at[node] <= at and at + lasting < seconds - RECOVERY_S:
            faults.append(Fault(round(at, 2), lasting, deck.pop(), node, detail))
            free_at[node] = at + lasting + (0.0 if node is None else RECOVERY_S)
        at += rng.uniform(0.5, 4.0)
    return faults
