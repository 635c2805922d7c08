"""What an answer's tokens are, and its text, however many of them come at once."""

import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_node.core.types import Sampling
from worker_node.tasks.generate.answer_text import AnswerText
from worker_node.tasks.generate.tokenizer import ByteDetokenizer

BYTES = [bytes([i]) for i in range(256)]
END = 200
TOKENIZER = SimpleNamespace(
    detokenizer=lambda *, skip_special_tokens: ByteDetokenizer(BYTES), end_tokens=frozenset({END})
)


def answered(steps, sampling):
    """The text and the number of tokens of an answer that the engine gives in these steps, until it has ended."""
    answer = AnswerText(TOKENIZER, sampling)
    text = ""
    for step in steps:
        text += answer.push(step)
        if answer.ended:
            break
    return text + answer.flush(), answer.tokens


@pytest.mark.parametrize(
    ("sampling", "text", "tokens"),
    [
        (Sampling(max_new_tokens=20, stop=("dog",)), "a ", 5),
        (Sampling(max_new_tokens=20, stop=("dog",), include_stop=True), "a dog", 5),
        (Sampling(max_new_tokens=20, stop_token_ids=(ord("o"),)), "a d", 4),
        (Sampling(max_new_tokens=20), "a dog runs", 10),
        (Sampling(max_new_tokens=20, stop=("dog",), min_tokens=6), "a dog runs", 10),
    ],
    ids=["stop", "stop kept", "stop token", "none", "stop too early"],
)
@given(cuts=st.sets(st.integers(1, 9)))
def test_text_and_count_are_those_of_tokens_that_come_one_by_one(sampling, text, tokens, cuts):
    given_ = list(b"a dog runs")
    edges = [0, *sorted(cuts), len(given_)]
    steps = [given_[begin:end] for begin, end in itertools.pairwise(edges)]
    assert answered(steps, sampling) == (text, tokens)
