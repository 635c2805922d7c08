"""What is known to break an NPU is kept away from it."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from worker_node.core.types import ModelKind
from worker_node.devices.npu import version_in
from worker_node.models import npu_rules
from worker_node.models.directory import MODEL_FILE, InstalledModel
from worker_node.models.npu_rules import devices_for, doubts_on_npu, known_prompt_limit, problem_on_npu


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
        ("gemma4", "3720", True),
        ("gemma4", "4000", False),
        ("gemma4_text", "3720", True),
        ("qwen3_next", "5000", True),
        ("llama", "4000", False),
    ],
)
def test_families_that_compute_garbage_or_hang_are_refused_with_the_source(model, family, architecture, refused):
    problem = problem_on_npu(model(family), architecture)
    assert (problem is not None) == refused
    assert problem is None or "(" in problem


@pytest.mark.parametrize(
    ("row", "driver", "openvino", "said"),
    [
        ({}, None, None, "4000: garbage (openvino#1)"),
        ({"driver": "<1742000000"}, "1738334590", None, "with driver 1738334590: garbage"),
        ({"driver": "<1742000000"}, "1752000000", None, None),
        ({"driver": "<1742000000"}, None, None, None),
        ({"driver": ">=1", "openvino": "2026.4"}, "9", "2026.4.1-22219-abc", "with openvino 2026.4.1-22219-abc: "),
        ({"driver": ">=1", "openvino": ">=2026.4"}, "9", "2026.3.1", None),
        ({"driver": ">=1", "openvino": ">=2026.4"}, None, "2026.4.1", None),
    ],
)
def test_a_family_is_refused_with_the_versions_that_break_it_alone(model, monkeypatch, row, driver, openvino, said):
    rows = [{"family": "lfm2", "problem": "garbage", "source": "openvino#1", **row}]
    monkeypatch.setattr(npu_rules, "_rows", lambda *_: rows)
    problem = problem_on_npu(model("lfm2"), "4000", driver, openvino)
    assert (problem is not None) == (said is not None)
    assert said is None or said in problem


def test_every_row_of_what_is_known_can_be_read():
    for row in npu_rules._rows("known_bad.toml", "known_bad"):
        required = {"family", "problem", "source"}
        assert required <= row.keys() <= required | {"architecture", "driver", "openvino"}
        assert re.search(r"#\d|\w/\w", row["source"])
        version_in("1", row.get("driver", "1"))
        version_in("1", row.get("openvino", "1"))


@pytest.mark.parametrize(
    ("quantization", "noted", "said"),
    [
        ("int8_asym", "", "the process dies while it generates (openvino#35641)"),
        ("int8_sym", "", None),
        ("int8_sym", '<group_size value="-1" />', None),
        ("int8_sym", '<group_size value="128" />', "an NPU takes one scale a row"),
        ("nf4", '<group_size value="-1" /><ratio value="1.0" />', None),
        ("nf4", '<ratio value="0.8" />', "only 0.8 of its weights are in 4 bits"),
        ("int4_asym", "", "an NPU takes symmetric ones"),
        ("int4_sym", '<group_size value="64" />', None),
        ("int4_sym", '<group_size value="128" /><ratio value="0.8" />', "only 0.8 of its weights are in 4 bits"),
        ("int4_sym", '<group_size value="128" /><ratio value="1" />', None),
        ("int4_sym", "", None),
        ("unknown", '<ratio value="0.8" />', None),
    ],
)
def test_weights_of_a_form_that_breaks_an_npu_are_refused(model, quantization, noted, said):
    problem = problem_on_npu(model(quantization=quantization, noted=noted), "4000")
    assert (problem is None) == (said is None)
    assert said is None or said in problem


def test_nf4_is_refused_by_the_generation_that_lacks_it(model):
    assert "from Lunar Lake (4000) on" in problem_on_npu(model(quantization="nf4"), "3720")
    assert problem_on_npu(model(quantization="nf4"), "5010") is None
    assert problem_on_npu(model(quantization="nf4", kind=ModelKind.EMBEDDING), "3720") is None


@pytest.mark.parametrize(
    ("quantization", "noted", "gigabytes", "said"),
    [
        ("int4_sym", '<group_size value="64" />', 1, ["in groups of 64: an NPU may be half as fast"]),
        ("int4_int8", '<group_size value="64" />', 1, ["in groups of 64"]),
        ("int4_sym", '<group_size value="128" />', 4.7, []),
        ("int8_sym", '<group_size value="-1" />', 8.6, []),
        ("int8_sym", "", 14, ["about 13 billion parameters"]),
        ("int4_sym", '<group_size value="32" />', 8, ["in groups of 32", "about 15 billion parameters"]),
        ("unknown", "", 30, []),
    ],
)
def test_what_is_slow_on_an_npu_or_may_not_compile_is_a_doubt(model, quantization, noted, gigabytes, said):
    installed = replace(
        model(quantization=quantization, noted=noted), files={"openvino_model.bin": int(gigabytes * 1e9)}
    )
    doubts = doubts_on_npu(installed)
    assert len(doubts) == len(said)
    for doubt, words in zip(doubts, said, strict=True):
        assert words in doubt
    assert doubts_on_npu(replace(installed, kind=ModelKind.EMBEDDING)) == ()


def test_encoders_may_have_any_weights_and_files_that_say_nothing_are_no_problem(model, tmp_path):
    assert problem_on_npu(model(quantization="int8_asym", kind=ModelKind.EMBEDDING), "4000") is None
    silent = InstalledModel("m", ModelKind.GENERATION, tmp_path / "nothing", 8192, "int4_sym", "x")
    assert problem_on_npu(silent, "4000") is None


@pytest.mark.parametrize(
    ("capabilities", "weights", "taken"),
    [
        (["generation"], "int8_sym", True),
        (["generation"], "int8_asym", False),
        (["chat", "vision"], "int4_asym", False),
        (["embedding"], "int8_asym", True),
        (["generation"], None, True),
        (["voice-activity"], "f32", False),
    ],
)
def test_the_column_of_the_catalog_follows_the_rules(capabilities, weights, taken):
    assert ("NPU" in devices_for(capabilities, weights)) == taken


CHANNEL_WISE = '<mode value="int4_sym" /><group_size value="-1" /><ratio value="1.0" />'


@pytest.mark.parametrize(
    ("architecture", "openvino", "noted", "quantization", "tokens"),
    [
        ("5010", "2026.4.1-1234-release", CHANNEL_WISE, "int4_sym", 16_000),
        ("5010", "2026.3.0", CHANNEL_WISE, "int4_sym", 8000),
        ("5010", "2026.2.1", CHANNEL_WISE, "int4_sym", 1800),
        ("5010", "2026.4.1", CHANNEL_WISE.replace("-1", "128"), "int4_sym", 1800),
        ("5010", "2026.4.1", CHANNEL_WISE, "int8_sym", 1800),
        ("5010", None, CHANNEL_WISE, "int4_sym", 1800),
        ("3720", "2026.4.1", CHANNEL_WISE, "int4_sym", 1800),
    ],
)
def test_long_prompts_are_known_to_be_right_on_what_others_ran_alone(
    model, architecture, openvino, noted, quantization, tokens
):
    found, source = known_prompt_limit(model(noted=noted, quantization=quantization), architecture, openvino)
    assert found == tokens
    assert source
