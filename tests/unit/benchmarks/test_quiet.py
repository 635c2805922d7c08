"""A measurement waits for a quiet machine and is repeated where it was disturbed; over CPU times that the test sets."""

import itertools
from types import SimpleNamespace

import pytest

from benchmarks import quiet
from benchmarks.quiet import ATTEMPTS, CpuReading, QuietGuard, describe_machine, disturbance, read_cpu
from benchmarks.raw import stream_counts


class Machine:
    """Two cores. `others` are the shares that others take in each second that passes; the last one goes on."""

    def __init__(self, *others, stolen=0.0, own=0.5):
        self.others, self.stolen, self.own = list(others), stolen, own
        self.now = CpuReading(0.0, 0.0, 0.0, 0.0)

    def read(self):
        return self.now

    async def passes(self, seconds=1.0):
        share = self.others.pop(0) if len(self.others) > 1 else self.others[0]
        now, own = self.now, self.own * seconds
        self.now = CpuReading(
            now.at + seconds, now.busy + own + share * 2, now.stolen + self.stolen * seconds, now.own + own
        )

    def guard(self, patience_s):
        return QuietGuard(patience_s, 0.05, 2, self.read, self.passes)

    def measurement(self):
        number = itertools.count(1)

        async def measure():
            await self.passes()
            return next(number)

        return measure


def test_what_the_benchmark_itself_uses_disturbs_nothing():
    before, after = CpuReading(0, 0, 0, 0), CpuReading(10, 20, 0, 20)
    assert disturbance(before, after, cores=2) == 0


@pytest.mark.parametrize(
    ("after", "share"),
    [
        (CpuReading(10, 15, 0, 10), 0.25),
        (CpuReading(10, 10, 5, 10), 0.25),
        (CpuReading(10, 9.9, 0, 10), 0.0),
        (CpuReading(0, 1, 0, 0), 0.0),
    ],
    ids=["other processes", "other guests", "clocks that differ a little", "no time"],
)
def test_the_disturbance_is_the_share_of_all_cores_that_others_had(after, share):
    assert disturbance(CpuReading(0, 0, 0, 0), after, cores=2) == pytest.approx(share)


async def test_a_measurement_begins_when_the_machine_is_quiet():
    machine = Machine(0.5, 0.5, 0.0)
    guard = machine.guard(60)
    assert await guard.take(machine.measurement()) == 1
    assert machine.now.at == 4, "two seconds of waiting, a quiet one, the measurement"
    assert (guard.measured, guard.disturbed) == (1, 0)
    assert guard.line().startswith("quiet machine")


async def test_a_disturbed_measurement_is_repeated():
    machine = Machine(0.0, 0.5, 0.0)
    guard = machine.guard(60)
    assert await guard.take(machine.measurement()) == 2
    assert guard.disturbed == 0


async def test_of_disturbed_measurements_the_least_disturbed_counts_and_is_reported():
    machine = Machine(0.0, 0.4, 0.0, 0.2, 0.0, 0.3)
    guard = machine.guard(60)
    assert await guard.take(machine.measurement()) == 2
    assert (guard.measured, guard.disturbed) == (1, 1)
    assert guard.worst == pytest.approx(0.2)
    assert "1 of 1" in guard.line()
    assert machine.now.at == 2 * ATTEMPTS


async def test_a_machine_that_is_never_quiet_is_waited_for_once_not_for_each_measurement():
    machine = Machine(0.5)
    guard = machine.guard(10)
    measure = machine.measurement()
    for number in range(1, 6):
        assert await guard.take(measure) == number
    assert machine.now.at == 10 + 5
    assert guard.disturbed == 5


async def test_without_patience_nothing_is_waited_for_and_the_disturbance_is_still_told():
    machine = Machine(0.0, stolen=1.0)
    guard = machine.guard(0)
    assert await guard.take(machine.measurement()) == 1
    assert guard.worst == pytest.approx(0.5)
    assert guard.line().startswith("DISTURBED")


def test_the_readings_of_this_machine_grow():
    before = read_cpu()
    sum(range(2_000_000))
    after = read_cpu()
    assert after.at > before.at
    assert after.own >= before.own > 0
    assert after.busy >= before.busy > 0


def _core(busy, steal=0.0):
    return SimpleNamespace(user=busy, system=0.0, nice=0.0, irq=0.0, softirq=0.0, steal=steal)


def test_only_the_cores_that_the_benchmark_may_use_are_watched(monkeypatch):
    monkeypatch.setattr(quiet.os, "sched_getaffinity", lambda _pid: {2, 3})
    idle = [_core(100.0, 7.0), _core(100.0), _core(1.0, 0.5), _core(2.0)]
    monkeypatch.setattr(quiet.psutil, "cpu_times", lambda percpu: idle if percpu else pytest.fail("all cores"))
    reading = read_cpu()
    assert (reading.busy, reading.stolen) == (3.0, 0.5)
    assert QuietGuard().cores == 2


@pytest.mark.parametrize(("cores", "streams"), [(1, [1]), (2, [1, 2]), (4, [1, 2, 4]), (8, [1, 2, 4, 8])])
def test_the_raw_pipeline_is_tuned_for_the_cores_that_it_has(cores, streams):
    assert stream_counts(cores) == streams


def test_a_machine_is_described_by_what_its_figures_depend_on(tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text("model name\t: A Processor\nflags\t\t: fpu avx2 avx512f\n\nmodel name\t: A Processor\n")
    found = describe_machine(info)
    assert found["cpu"] == "A Processor"
    assert found["features"] == ["avx2", "avx512f"]
    assert found["cores"] >= 1
    assert describe_machine(tmp_path / "none")["cpu"]
