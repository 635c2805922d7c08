"""How many tokens of a prompt an earlier one had computed already: whole blocks at its beginning."""

import numpy as np
import pytest

from worker_node.scheduling.steps import BLOCK_TOKENS
from worker_node.tasks.generate.continuous import PrefixHits

PREFIX = list(range(600))


def ids(tokens):
    return np.array(tokens, "<i4").tobytes()


def prompt(*tail):
    return ids([*PREFIX, *tail])


def test_a_repeated_prefix_of_600_tokens_leaves_less_than_a_fifth_to_compute():
    hits = PrefixHits()
    assert hits.look_up(prompt(7, 8, 9)) == 0
    hits.computed(prompt(7, 8, 9))
    hit = hits.look_up(prompt(1, 2, 3, 4, 5))
    assert hit == 600 // BLOCK_TOKENS * BLOCK_TOKENS
    assert (605 - hit) * 5 < 605
    assert (hits.asked_tokens, hits.hit_tokens) == (603 + 605, hit)


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
