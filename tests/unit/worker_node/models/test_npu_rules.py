"""What is known to break an NPU is kept away from it."""

import json
from pathlib import Path

import pytest

from worker_node.core.types import ModelKind
from worker_node.devices.npu import version_in
from worker_node.models import npu_rules
from worker_node.models.directory import MODEL_FILE, InstalledModel
from worker_node.models.npu_rules import devices_for, problem_on_npu, slowness_on_npu


@pytest.fixture
def model(tmp_path):
    def make(family="llama", quantization="int4_sym", kind=ModelKind.GENERATION, noted=""):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
        weights = f"<nncf><weight_compression>{noted}</weight_compression></nncf>"
        (tmp_path / MODEL_FILE).write_text("<net>" + " " * 70_000 + f"<rt_info>{weights}</rt_info></net>")
        return InstalledModel("m", kind, Path(tmp_path), 8192, quantization, family)

    return make


@pytest.mark.parametrize(
    ("family", "architecture", "refused"),
    [
        ("lfm2", "4000", True),
        ("lfm2", "3720", False),
        ("qwen3_5", "3720", True),
        ("qwen3_next", "5000", True),
        ("llama", "4000", False),
        ("swin", "3720", True),
        ("swin", "4000", False),
    ],
)
def test_families_that_compute_garbage_or_hang_are_refused_with_the_source(model, family, architecture, refused):
    problem = problem_on_npu(model(family), architecture)
    assert (problem is not None) == refused
    assert problem is None or "#" in problem


@pytest.mark.parametrize(
    ("wanted", "driver", "refused"),
    [
        ("<1742000000", "1738334590", True),
        ("<1742000000", "1752000000", False),
        ("1738334590", "1738334590", True),
        ("1738334590", "1738334591", False),
        ("<1742000000", None, False),
        (None, None, True),
    ],
)
def test_a_family_is_refused_with_the_drivers_that_break_it_alone(model, monkeypatch, wanted, driver, refused):
    row = {"family": "lfm2", "problem": "garbage", "source": "openvino#1"}
    rows = [row | ({} if wanted is None else {"driver": wanted})]
    monkeypatch.setattr(npu_rules, "_known_bad", lambda: rows)
    problem = problem_on_npu(model("lfm2"), "4000", driver)
    assert (problem is not None) == refused
    assert problem is None or wanted is None or f"with driver {driver}" in problem


def test_every_row_of_what_is_known_can_be_read():
    for row in npu_rules._known_bad():
        required = {"family", "problem", "source"}
        assert required <= row.keys() <= required | {"architecture", "driver"}
        assert "#" in row["source"]
        version_in("1", row.get("driver", "1"))


@pytest.mark.parametrize(
    ("quantization", "noted", "said"),
    [
        ("int8_asym", "", "the process dies while it generates (openvino#35641)"),
        ("int8_sym", "", "the process dies while it generates"),
        ("int4_asym", "", "an NPU takes symmetric ones"),
        ("int4_sym", '<group_size value="64" />', None),
        ("int4_sym", '<group_size value="128" /><ratio value="0.8" />', "only 0.8 of its weights are int4"),
        ("int4_sym", '<group_size value="-1" /><ratio value="1.0" />', None),
        ("int4_sym", '<group_size value="128" /><ratio value="1" />', None),
        ("int4_sym", "", None),
        ("f16", "", None),
        ("unknown", '<ratio value="0.8" />', None),
    ],
)
def test_weights_of_a_form_that_breaks_an_npu_are_refused(model, quantization, noted, said):
    problem = problem_on_npu(model(quantization=quantization, noted=noted), "4000")
    assert (problem is None) == (said is None)
    assert said is None or said in problem


def test_encoders_may_have_any_weights_and_files_that_say_nothing_are_no_problem(model, tmp_path):
    assert problem_on_npu(model(quantization="int8_asym", kind=ModelKind.EMBEDDING), "4000") is None
    silent = InstalledModel("m", ModelKind.GENERATION, tmp_path / "nothing", 8192, "int4_sym", "x")
    assert problem_on_npu(silent, "4000") is None


@pytest.mark.parametrize(
    ("noted", "kind", "slow"),
    [
        ('<group_size value="64" />', ModelKind.GENERATION, True),
        ('<group_size value="64" />', ModelKind.EMBEDDING, False),
        ('<group_size value="128" />', ModelKind.GENERATION, False),
        ('<group_size value="-1" />', ModelKind.GENERATION, False),
        ("", ModelKind.GENERATION, False),
    ],
)
def test_weights_in_small_groups_are_called_slow(model, noted, kind, slow):
    found = slowness_on_npu(model(kind=kind, noted=noted))
    assert (found is not None) == slow
    assert found is None or "64 elements" in found


@pytest.mark.parametrize(
    ("capabilities", "weights", "taken"),
    [
        (["generation"], "int4_sym", True),
        (["generation"], "int4_int8", True),
        (["generation"], "nf4", True),
        (["generation"], "int8_sym", False),
        (["chat", "vision"], "int4_asym", False),
        (["embedding"], "int8_sym", True),
        (["generation"], None, True),
        (["voice-activity"], "f32", False),
    ],
)
def test_the_column_of_the_catalog_follows_the_rules(capabilities, weights, taken):
    assert ("NPU" in devices_for(capabilities, weights)) == taken
