"""Which blobs are taken: those that were compiled for exactly this model, machine and settings, and are unchanged."""

import errno
import os

import pytest
from openvino.properties import CompatibilityCheck

from worker_node.devices.blobs import (
    RECORD_FILE,
    BlobRejected,
    ModelBlobs,
    check_blobs,
    compile_encoder,
    read_record,
    require_npu,
    requirements_of,
    write_record,
)
from worker_node.devices.npu import with_remedy

HERE = {
    "model_sha256": "aa",
    "device": "NPU",
    "architecture": "4000",
    "driver": "1.13.0",
    "compiler": "7.0",
    "openvino": "2026.4.1",
    "genai": "2026.4.1.0",
    "max_prompt_len": 1024,
    "npu_buckets": [32, 64],
}
NAME = "generate.blob"


@pytest.fixture
def blobs(tmp_path):
    (tmp_path / NAME).write_bytes(b"compiled" * 100)
    write_record(tmp_path, "small", HERE, [NAME])
    return tmp_path


def check(directory, here, **more):
    check_blobs(directory, read_record(directory), here, [NAME], **more)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"driver": "1.14.0"}, "driver was 1.13.0, and is 1.14.0 here"),
        ({"driver": None}, "driver was 1.13.0, and is not set or unknown here"),
        ({"model_sha256": "bb"}, "compiled for something else (small): model_sha256 was aa"),
        ({"npu_buckets": [32]}, "npu_buckets was [32, 64], and is [32] here"),
        ({"prefill_hint": "STATIC"}, "prefill_hint was not set or unknown, and is STATIC here"),
    ],
)
def test_blobs_made_for_something_else_are_rejected_with_the_difference(blobs, change, reason):
    with pytest.raises(BlobRejected) as rejected:
        check(blobs, HERE | change)
    assert reason in str(rejected.value)
    assert str(blobs) in str(rejected.value)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"D"), "its hash is not"),
        (os.unlink, "is missing"),
        pytest.param(lambda path: (path.unlink(), os.mkfifo(path)), "missing", marks=pytest.mark.linux),
    ],
    ids=["one byte", "removed", "a pipe"],
)
def test_a_changed_blob_is_rejected_by_its_name_before_anything_native_reads_it(blobs, damage, reason):
    damage(blobs / NAME)
    with pytest.raises(BlobRejected, match=NAME) as rejected:
        check(blobs, HERE)
    assert reason in str(rejected.value)


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"\xff\xfe", b'{"version": 2, "origin": 3, "files": {}}', b"[" * 100_000],
    ids=["empty", "no fields", "no text", "wrong types", "too deep"],
)
def test_a_record_that_is_none_is_rejected_by_its_name(blobs, content):
    (blobs / RECORD_FILE).write_bytes(content)
    with pytest.raises(BlobRejected, match=RECORD_FILE):
        check(blobs, HERE)


NEEDS = "meta=2.7;ov=2026.4.1;desc=[compiler=8.4;npu=4000;t=4;elf=1.2.2;mi=11.4.10]"
OTHER_VERSIONS = {"architecture": "5010", "driver": "2.0", "compiler": "9", "openvino": "2027.1"}


def test_a_device_that_says_it_runs_a_blob_takes_it_from_other_versions_but_not_from_other_settings(blobs):
    check(blobs, HERE | OTHER_VERSIONS, runs=True)
    for change in ({"max_prompt_len": 2048}, {"model_sha256": "bb"}, {"genai": "2027"}, {"device": "NPU-emulated"}):
        with pytest.raises(BlobRejected, match=next(iter(change))):
            check(blobs, HERE | change, runs=True)


def test_blobs_for_another_machine_depend_on_no_driver_of_the_one_that_made_them(blobs):
    write_record(blobs, "small", HERE | {"driver": None, "compiler": "8"}, [NAME], proven=False)
    assert not read_record(blobs).proven
    check(blobs, HERE)
    for change in ({"architecture": "5010"}, {"openvino": "2027.1"}):
        with pytest.raises(BlobRejected, match=next(iter(change))):
            check(blobs, HERE | change)


class Core:
    """OpenVINO with an NPU that has these properties, and answers a question by what is asked."""

    available_devices = ("NPU",)

    def __init__(self, answer=None, *, weightless=True, **properties):
        self.answer, self.weightless, self.properties = answer, weightless, properties
        self.asked, self.compiled = [], []

    def get_property(self, _device, name, arguments=None):
        if name == "COMPATIBILITY_CHECK" and self.answer is not None:
            self.asked.append(arguments["RUNTIME_REQUIREMENTS"])
            return self.answer
        if name not in self.properties:
            raise RuntimeError(f"Unsupported configuration key: {name}")
        return self.properties[name]

    def compile_model(self, _model, _device, config):
        self.compiled.append(config)
        if "ENABLE_WEIGHTLESS" in config and not self.weightless:
            raise RuntimeError("not supported by this compiler")
        return self


@pytest.fixture
def model(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    for name in ("openvino_model.xml", "openvino_model.bin"):
        (directory / name).write_bytes(b"x")
    return ModelBlobs("small", directory, [NAME], {"npu_buckets": [32]}, emulated=False)


MACHINE = {"DEVICE_ARCHITECTURE": "4000", "NPU_DRIVER_VERSION": "1", "NPU_COMPILER_VERSION": "7"}
UPGRADED = MACHINE | {"NPU_DRIVER_VERSION": "2", "NPU_COMPILER_VERSION": "8"}


@pytest.mark.parametrize(
    ("answer", "taken"),
    [
        (CompatibilityCheck.SUPPORTED, True),
        (CompatibilityCheck.UNSUPPORTED, False),
        (CompatibilityCheck.NOT_APPLICABLE, False),
        (None, False),
    ],
)
def test_after_an_upgrade_the_device_is_asked_and_without_its_answer_versions_must_be_equal(
    blobs, model, answer, taken
):
    model.written(Core(**MACHINE), blobs, {NAME: NEEDS})
    assert model.checked(Core(**MACHINE), blobs)["WEIGHTS_PATH"] == str(model.weights)
    core = Core(answer, **UPGRADED)
    if taken:
        model.checked(core, blobs)
    else:
        with pytest.raises(BlobRejected):
            model.checked(core, blobs)
    assert core.asked == ([] if answer is None else [NEEDS])


def test_what_the_device_refuses_is_rejected_though_all_versions_are_equal(blobs, model):
    model.written(Core(**MACHINE), blobs, {NAME: NEEDS})
    with pytest.raises(BlobRejected, match=r"need another NPU or driver .*npu=4000.*compile again here"):
        model.checked(Core(CompatibilityCheck.UNSUPPORTED, **MACHINE), blobs)


@pytest.mark.parametrize(
    ("core", "emulated", "compiled"),
    [
        (Core(**MACHINE), False, [True]),
        (Core(**MACHINE, weightless=False), False, [True, False]),
        (Core(DEVICE_ARCHITECTURE="3720"), False, [False]),
        (Core(), False, [False]),
        (Core(**MACHINE), True, [False]),
    ],
    ids=["4000", "a compiler that cannot", "3720", "unknown", "emulated"],
)
def test_an_encoder_is_compiled_without_its_weights_where_the_compiler_can(core, emulated, compiled):
    compile_encoder(core, None, {"CACHE_DIR": "x"}, emulated=emulated)
    assert ["ENABLE_WEIGHTLESS" in config for config in core.compiled] == compiled
    assert all(config["CACHE_DIR"] == "x" for config in core.compiled)


def test_the_user_decides_about_weights_before_the_node():
    core = Core(**MACHINE)
    compile_encoder(core, None, {"ENABLE_WEIGHTLESS": "NO"}, emulated=False)
    assert core.compiled[0]["ENABLE_WEIGHTLESS"] == "NO"


def test_a_machine_without_a_compiler_cannot_compile_for_another():
    with pytest.raises(RuntimeError, match="no NPU compiler on this machine: its wheel for Windows has one"):
        require_npu(Core(), {"NPU_PLATFORM": "4000"}, emulated=False)
    require_npu(Core(NPU_COMPILER_VERSION="524292"), {"NPU_PLATFORM": "4000"}, emulated=False)


def test_requirements_that_openvino_does_not_tell_are_unknown():
    class Compiled:
        def get_property(self, name):
            if name != "RUNTIME_REQUIREMENTS":
                raise AssertionError(name)
            raise RuntimeError("Unsupported configuration key")

    assert requirements_of(Compiled()) is None


class CpuAlone:
    available_devices = ("CPU",)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOENT])
def test_an_npu_that_openvino_does_not_see_since_it_is_full_is_said_to_be(monkeypatch, number):
    def refused(*_arguments):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("worker_node.devices.blobs.os.open", refused)
    with pytest.raises(RuntimeError, match="sees no NPU on this machine, only CPU") as raised:
        require_npu(CpuAlone(), {}, emulated=False)
    assert ("64 and 127 for one user" in with_remedy(str(raised.value))) == (number == errno.EMFILE)
