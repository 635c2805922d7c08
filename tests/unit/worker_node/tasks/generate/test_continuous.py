"""How many tokens of a prompt an earlier one had computed already: whole blocks at its beginning."""

import numpy as np
import pytest

from worker_node.scheduling.prompts import BLOCK_TOKENS
from worker_node.tasks.generate.continuous import PrefixHits

PREFIX = list(range(600))


def ids(tokens):
    return np.array(tokens, "<i4").tobytes()


def prompt(*tail):
    return ids([*PREFIX, *tail])


@pytest.mark.parametrize("position", [0, 1, 31, 32, 300, 599])
def test_from_the_first_difference_on_nothing_is_hit(position):
    hits = PrefixHits()
    hits.computed(prompt())
    other = [*PREFIX]
    other[position] = 99_999
    assert hits.look_up(ids(other)) == position // BLOCK_TOKENS * BLOCK_TOKENS


def test_the_blocks_that_were_seen_least_recently_are_forgotten():
    hits = PrefixHits(remembered=4)
    old, new = PREFIX[: 2 * BLOCK_TOKENS], [token + 1000 for token in PREFIX[: 2 * BLOCK_TOKENS]]
    hits.computed(ids(old))
    hits.computed(ids(new))
    hits.computed(ids(old))
    hits.computed(ids([token + 2000 for token in PREFIX[: 2 * BLOCK_TOKENS]]))
    assert hits.look_up(ids(old)) == 2 * BLOCK_TOKENS
    assert hits.look_up(ids(new)) == 0
