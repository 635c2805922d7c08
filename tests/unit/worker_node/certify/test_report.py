"""The report of a certification: what the page and the summary say, and that they stay text."""

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from tests.support.passports import check, passport_for
from worker_node.certify.report import page, summary
from worker_node.models.passports import Identity

HERE = Identity("m", "0" * 64, "NPU", "4000", "1.2", "c", "2026.4", "1" * 64, False)


def tree(html):
    head, body = html.split("<body>")
    assert "<script" not in head + body
    return ElementTree.fromstring("<body>" + body.removesuffix("</html>\n"))  # noqa: S314  (ours)


@pytest.mark.parametrize("emulated", [True, False])
def test_a_report_of_an_emulated_npu_says_so_in_its_heading(emulated):
    found = passport_for(replace(HERE, emulated=emulated))
    heading = "m on NPU: certified" + (" (emulated)" if emulated else "")
    assert summary(found).splitlines()[0] == f"### {heading}"
    assert f"<title>{heading}</title>" in page(found)
    for text in (summary(found), page(found)):
        assert ("Emulated on a CPU" in text) is emulated


def test_page_and_summary_name_what_the_result_holds_for():
    found = passport_for(HERE, verdict="limited", limits={"max_prompt_tokens": 480})
    cells = [cell.text for cell in tree(page(found)).iter("td")]
    for value in ("NPU, 4000", "1.2", "c", "2026.4", "this CPU", "nobody", "480 tokens"):
        assert value in cells
        assert value in summary(found)
    assert "0" * 64 in cells


def test_each_check_has_its_result_and_what_was_found_as_text():
    checks = [check("load", "passed"), check("canary", "failed") | {"detail": "a | <b> & c", "facts": [8, 11]}]
    found = passport_for(HERE, verdict="failed", checks=checks)
    *_, row = tree(page(found)).iter("tr")
    assert row.get("class") == "failed"
    assert [cell.text for cell in row] == ["canary", "failed", "a | <b> & c", "8, 11"]
    assert summary(found).splitlines()[-1] == "| canary | failed | a / <b> & c |"


def test_what_supplied_the_machine_and_what_a_joule_did_are_shown_where_they_are_known():
    assert "power" not in summary(passport_for(HERE))
    limits = {"min": 333, "max": 1950}
    power = {"source": "AC", "adapter_watts": 100.0, "npu_mhz": limits}
    found = passport_for(HERE, power=power, efficiency={"tokens_per_joule": 12.5})
    cells = [cell.text for cell in tree(page(found)).iter("td")]
    for name, value in (
        ("power", "AC, an adapter of 100 W"),
        ("MHz of the NPU", "min 333, max 1950"),
        ("tokens per joule", "12.5"),
    ):
        assert f"{name} {value}" in summary(found)
        assert cells[cells.index(name) + 1] == value
