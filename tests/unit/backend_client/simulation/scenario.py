"""A scenario, drawn from a seed: nodes, their faults over time, and the calls."""

import math
import random
from dataclasses import dataclass

from tests.unit.backend_client.simulation.nodes import ALIAS, EMBEDDER, OTHER, SPACES, WRITER

# How long after its end a fault may keep requests away: 5 s where probes or trials show its end, else a quarantine.
KILLED = f"killed {WRITER}"
FAULTS = {
    KILLED: 5.0,
    "dead": 5.0,
    "unroutable": 5.0,
    "frozen": 5.0,
    f"hung {EMBEDDER}": 5.0,
    f"hung {WRITER}": 5.0,
    "slow": 5.0,
    "busy": 5.0,
    "loading": 5.0,
    "draining": 5.0,
    "failing": 5.0,
    "flaky": 5.0,
    "probes lost": 5.0,
    "cut": 31.0,
    "broken": 31.0,
    "another space": math.inf,
    "another alias": 0.0,
}


@dataclass(frozen=True)
class Fault:
    start: float
    end: float
    node: int
    kind: str


@dataclass(frozen=True)
class Call:
    at: float
    kind: str
    timeout: float
    model: str | None
    texts: tuple[str, ...]
    leaves_after: float | None


@dataclass(frozen=True)
class Scenario:
    seed: int
    nodes: tuple[dict, ...]
    faults: tuple[Fault, ...]
    calls: tuple[Call, ...]
    close_at: float | None
    duration: float


def draw(seed):
    rng = random.Random(seed)
    count = rng.randint(1, 3)
    duration = rng.uniform(8.0, 25.0)
    same_space = rng.random() < 0.8
    two_models = rng.random() < 0.5
    nodes = []
    for _ in range(count):
        spaces = {EMBEDDER: SPACES[0] if same_space else rng.choice(SPACES[:2])}
        if two_models:
            spaces[OTHER] = SPACES[2]
        nodes.append({"spaces": spaces, "alias": rng.choice(list(spaces))})
    faults = []
    for node in range(count):
        at = rng.uniform(-3.0, duration)
        for _ in range(rng.randint(0, 3)):
            end = at + 10 ** rng.uniform(-2.0, 1.0)
            faults.append(Fault(at, end, node, rng.choice([kind for kind in FAULTS if kind != KILLED])))
            at = end + 10 ** rng.uniform(-2.0, 1.0)
    calls = [_call(rng, rng.uniform(0.0, duration), two_models=two_models) for _ in range(rng.randint(10, 50))]
    if rng.random() < 0.5:
        # A steady load, in which every healthy node must have a part.
        rate = 5.0 * count
        calls += [
            Call(index / rate, "embed", rng.choice([0.3, 1.0, 5.0, 30.0]), EMBEDDER, (f"steady {index}",), None)
            for index in range(int(duration * rate))
        ]
    if rng.random() < 0.15:
        # The whole fleet at once, which is what the retry budget is for.
        at, kind = (
            rng.uniform(0.0, duration / 2),
            rng.choice(["busy", "slow", "failing", "broken", "cut", "flaky", "flaky"]),
        )
        faults = [Fault(at, at + rng.uniform(1.0, 12.0), node, kind) for node in range(count)]
    close_at = rng.uniform(0.0, duration) if rng.random() < 0.25 else None
    if close_at is not None:
        # Something should be under way then.
        kind = rng.choice(["frozen", "slow", f"hung {EMBEDDER}"])
        faults = [Fault(close_at - rng.uniform(0.0, 1.5), close_at + 3.0, node, kind) for node in range(count)]
        calls += [_call(rng, close_at - rng.uniform(0.0, 0.3), two_models=two_models) for _ in range(5)]
    # By numbers of its own, so that the other scenarios stay as they are.
    kills = random.Random(f"kills {seed}")
    if close_at is None and kills.random() < 0.2:
        # The engines of one model are killed everywhere at once: nowhere is another node to go to.
        at = kills.uniform(0.0, duration / 2)
        faults = [Fault(at, at + kills.uniform(1.0, 12.0), node, KILLED) for node in range(count)]
        calls += [
            Call(
                at + kills.uniform(-0.03, 0.3),
                "generate",
                kills.uniform(20.0, 90.0),
                WRITER,
                (f"killed {index}",),
                None,
            )
            for index in range(8)
        ]
    calls.sort(key=lambda call: call.at)
    return Scenario(seed, tuple(nodes), tuple(faults), tuple(calls), close_at, duration)


def _call(rng, at, *, two_models):
    kind = rng.choices(["embed", "embed_many", "generate", "stream"], [6, 1, 2, 2])[0]
    timeout = math.exp(rng.uniform(math.log(0.005), math.log(60.0)))
    leaves_after = rng.uniform(0.0, timeout) if rng.random() < 0.1 else None
    if kind in {"generate", "stream"}:
        return Call(at, kind, timeout, WRITER, (f"prompt {rng.random()}",), leaves_after)
    names = [EMBEDDER, EMBEDDER, ALIAS, None, *([OTHER] if two_models else [])]
    texts = rng.randint(65, 300) if kind == "embed_many" else 1
    model = rng.choice(names)
    return Call(at, kind, timeout, model, tuple(f"text {rng.random()}" for _ in range(texts)), leaves_after)
