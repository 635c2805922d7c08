"""Reasoning is told from the answer however both are cut."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from worker_node.core.types import Reasoning, Token
from worker_node.tasks.generate.answer_text import ReasoningFirst

PLAIN = st.text("ab<think/> \n", max_size=20).filter(lambda text: "<think>" not in text and "</think>" not in text)
CUTS = st.lists(st.integers(0, 60), max_size=30)


def parse(text, cuts=(), *, begun=False):
    parser = ReasoningFirst(begun=begun)
    ends = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    pieces = [piece for start, end in itertools.pairwise(ends) for piece in parser.push(text[start:end])]
    pieces += parser.flush()
    return tuple("".join(p.text for p in pieces if isinstance(p, kind)) for kind in (Reasoning, Token))


@given(PLAIN, PLAIN, CUTS, st.booleans())
def test_reasoning_and_answer_are_separated_however_the_text_is_cut(thought, answer, cuts, begun):
    text = f"{'' if begun else '<think>'}{thought}</think>\n\n{answer}"
    assert parse(text, cuts, begun=begun) == (thought, answer.lstrip())


@given(PLAIN, CUTS)
def test_without_reasoning_all_is_answer(answer, cuts):
    assert parse(answer, cuts) == ("", answer)


def test_reasoning_that_was_cut_is_no_answer():
    assert parse("<think>so far") == ("so far", "")


def test_a_tag_in_the_middle_is_text():
    assert parse("see <think>x</think>") == ("", "see <think>x</think>")
