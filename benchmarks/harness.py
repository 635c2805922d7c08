"""Taking figures in turn, and saying them as ratios."""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.quiet import QuietGuard

ROUNDS = 5
# Every measurement of `in_turn` goes through it; the command sets its patience.
GUARD = QuietGuard()


@dataclass
class Figure:
    """One measured quantity over the rounds, and its ratio to the round's baseline."""

    name: str
    unit: str
    values: list[float]
    ratios: list[float] = field(default_factory=list)
    target: float | None = None

    @property
    def median(self):
        return statistics.median(self.values)

    def line(self):
        text = f"  {self.name:58s} {self.median:10.2f} {self.unit}  ({min(self.values):.2f} … {max(self.values):.2f})"
        if self.ratios:
            ratio = statistics.median(self.ratios)
            text += f"   ÷ baseline {ratio:.3f} ({min(self.ratios):.3f} … {max(self.ratios):.3f})"
            if self.target is not None:
                text += f"   target ≥ {self.target}: {'reached' if ratio >= self.target else 'MISSED'}"
        return text


@dataclass
class Contender:
    """Something that is measured in each round. `target` bounds its ratio to the baseline from below."""

    name: str
    measure: Callable[[], Awaitable[float]]
    target: float | None = None


async def in_turn(title, unit, contenders, rounds=ROUNDS):
    """Measure all contenders in each round, after one that does not count; the first is the baseline.

    It is measured before and after each of the others, and what is between is compared with the mean of the two: shared
    machines change their speed within seconds. The order of the others alternates from round to round.
    """
    baseline, others = contenders[0], contenders[1:]
    values = {contender.name: [] for contender in contenders}
    ratios = {contender.name: [] for contender in contenders}
    for number in range(-1, rounds):
        before = await GUARD.take(baseline.measure)
        for contender in others if number % 2 else others[::-1]:
            value = await GUARD.take(contender.measure)
            after = await GUARD.take(baseline.measure)
            if number >= 0:
                values[contender.name].append(value)
                ratios[contender.name].append(2 * value / (before + after))
                values[baseline.name].append(after)
            before = after
    figures = [Figure(c.name, unit, values[c.name], ratios[c.name], c.target) for c in contenders]
    show(title, figures)
    return figures


def show(title, figures):
    """Print figures under a title."""
    print(title)
    for figure in figures:
        print(figure.line())
    print(flush=True)


def to_json(figures):
    """Figures as plain data."""
    return [asdict(figure) | {"median": figure.median} for figure in figures]


class RawPipeline:
    """A raw OpenVINO pipeline in a process of its own (see `raw.py`), so that nothing of ours shares its process."""

    def __init__(self, kind, path):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.raw", kind, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            cwd=Path(__file__).parents[1],
        )
        self.about = json.loads(self._process.stdout.readline())

    def run(self, **task):
        """Run one task there and return what it measured."""
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self):
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()
