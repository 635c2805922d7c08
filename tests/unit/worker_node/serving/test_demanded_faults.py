"""Faults on demand: which files of them are taken, and which engines and requests they strike."""

import msgspec
import pytest

from tests.support.scripted_runner import RUNNER
from worker_node.core.errors import ConfigurationError
from worker_node.core.types import Device
from worker_node.encoders.jobs import row_job
from worker_node.engines.child import make_runner
from worker_node.engines.protocol import DeviceBroken, EngineSpec
from worker_node.serving.demanded_faults import Fault, check_faults, faults_of, faulty, read_faults
from worker_node.settings import NodeSettings


@pytest.fixture
def faulty_settings(tmp_path):
    def write(text, **settings):
        path = tmp_path / "faults.toml"
        path.write_text(text)
        return NodeSettings(faults=path, **settings)

    return write


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("kind = 1", "missing required field `fault`|unknown field `kind`"),
        ("[[fault]]\nkind = 'tired'", r"Invalid enum value 'tired' - at `\$.fault\[0\].kind`"),
        ("[[fault]]\nkind = 'crash'\nevery = 0", r">= 1 - at `\$.fault\[0\].every`"),
        ("[[fault]]\nkind = 'slow_compile'\nseconds = nan", "seconds"),
        ("[[fault", "not: "),
        ("#" * 100_001, "more than 100000 bytes"),
    ],
)
def test_a_file_of_faults_is_checked(tmp_path, text, problem):
    path = tmp_path / "faults.toml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=problem):
        read_faults(path)


def test_a_missing_file_of_faults_is_named(tmp_path):
    with pytest.raises(ConfigurationError, match=r"none\.toml is not: .*No such file"):
        read_faults(tmp_path / "none.toml")


def test_a_fault_must_be_of_a_served_model(faulty_settings):
    settings = faulty_settings("[[fault]]\nkind = 'crash'\nmodel = 'minilm'", npu_emulation=True)
    check_faults(settings, ["minilm"])
    with pytest.raises(ConfigurationError, match=r"model must be the id of a model of the settings \(other\)"):
        check_faults(settings, ["other"])


def test_faults_are_for_emulation_unless_they_are_allowed(faulty_settings):
    with pytest.raises(ValueError, match="faults are for nodes with npu_emulation, or with allow_faults"):
        faulty_settings("[[fault]]\nkind = 'crash'")


def test_model_and_device_confine_a_fault(faulty_settings):
    text = "[[fault]]\nkind = 'crash'\nmodel = 'm'\n[[fault]]\nkind = 'hang'\ndevice = 'CPU'"
    settings = faulty_settings(text, allow_faults=True)

    def kinds(model, device):
        return [fault.kind for fault in faults_of(model, device, settings)]

    assert kinds("m", Device.NPU) == ["crash"]
    assert kinds("m", Device.CPU) == ["crash", "hang"]
    assert kinds("n", Device.CPU) == ["hang"]
    assert kinds("n", Device.GPU) == []


def test_a_schedule_says_which_requests_are_struck():
    fault = Fault(kind="garbage", after=3, every=2, beyond_tokens=500)
    assert [count for count in range(1, 9) if fault.strikes(count, 501)] == [4, 6, 8]
    assert not fault.strikes(4, 500)


def test_a_fault_is_shown_as_it_was_written():
    fault = Fault(kind="slow_compile", device=Device.NPU, seconds=3)
    assert str(fault) == "slow_compile device=NPU seconds=3"


def answered(faults, *, jobs=4, cancelled=()):
    """The vectors of an engine with these faults, by the id of their job."""
    spec = EngineSpec("m", "embedding", "", Device.CPU, RUNNER, {})
    runner = make_runner(faulty(spec, faults))
    found = {}

    def emit(outcome):
        found.update((part.id, part.data) for part in outcome.parts())

    runner.load()
    for number in range(1, jobs + 1):
        runner.submit(msgspec.structs.replace(row_job([[5, 6]], deadline=0.0), id=number))
        if number in cancelled:
            runner.cancel(number)
        runner.step(emit, lambda: None)
    return found


def test_garbage_comes_by_schedule_and_by_seed():
    right = answered([])
    garbage = answered([Fault(kind="garbage", after=1, every=2)])
    assert [number for number in right if garbage[number] != right[number]] == [2, 4]
    assert {len(data) for data in garbage.values()} == {len(right[1])}
    assert garbage == answered([Fault(kind="garbage", after=1, every=2)])
    assert garbage != answered([Fault(kind="garbage", after=1, every=2, seed=1)])


def test_a_cancelled_request_strikes_nothing():
    lost = [Fault(kind="lost_device", after=1)]
    assert answered(lost, jobs=2, cancelled=[2]).keys() == {1}
    with pytest.raises(DeviceBroken, match="ZE_RESULT_ERROR_DEVICE_LOST"):
        answered(lost, jobs=2)
