"""Who is suspected when an engine dies, and who is not: over scripted deaths and a simulated fleet of requests."""

from hypothesis import given
from hypothesis import strategies as st

from worker_node.engines.isolation import OnBoard, Standing, Suspects, Trials, Visit, fingerprint
from worker_node.tasks.embed.messages import embed_job
from worker_node.tasks.generate.messages import GenerateJob

A, B, C = b"a", b"b", b"c"


def on_board(*keys, proven=()):
    return [OnBoard(key, fresh=key not in proven) for key in keys]


def suspects():
    return Suspects(clock=lambda: 0.0)


def standings(found, *keys):
    return [found.standing(key) for key in keys]


def test_alone_both_times_when_an_engine_died_twice_is_refused():
    found = suspects()
    assert not found.died(on_board(A)), "the first time it may be the engine"
    assert found.standing(A) is Standing.PRIME
    assert found.died(on_board(A))
    assert found.standing(A) is Standing.REFUSED


def test_all_deaths_that_were_counted_are_taken_back_when_the_request_is_found():
    found = suspects()
    assert not found.died(on_board(A, B))
    assert not found.died(on_board(A, B, C, proven={A, B})), "the new one might have done it by itself"
    found.answered(B)
    found.answered(C)
    deaths = [found.died(on_board(A)) for _ in range(2)]
    assert [(bool(blame), blame.pardons) for blame in deaths] == [(True, 0), (True, 2)]
    assert found.standing(A) is Standing.REFUSED


def test_an_answer_in_between_clears():
    found = suspects()
    found.died(on_board(A))
    found.answered(A)
    found.died(on_board(A))
    assert found.standing(A) is Standing.PRIME


def test_all_on_board_are_suspects_but_nobody_is_refused_for_company():
    found = suspects()
    assert not found.died(on_board(A, B, C))
    assert standings(found, A, B, C) == [Standing.SUSPECT] * 3
    found.died(on_board(A, B, C))
    found.died(on_board(A, B, C))
    assert standings(found, A, B, C) == [Standing.PRIME] * 3


def test_those_that_only_waited_are_not_suspects():
    found = suspects()
    found.died(on_board(A, B, C), {A})
    assert standings(found, A, B, C) == [Standing.PRIME, Standing.CLEAR, Standing.CLEAR]


def test_the_only_one_that_had_not_shown_itself_harmless_is_the_prime_suspect():
    found = suspects()
    found.died(on_board(A, B, C))
    assert found.died(on_board(A, B, C, proven={A, B}))
    assert standings(found, A, B, C) == [Standing.SUSPECT, Standing.SUSPECT, Standing.PRIME]


def test_a_suspect_that_had_results_at_death_after_death_is_tried_to_its_end():
    found = suspects()
    found.died(on_board(A, B, C))
    found.died(on_board(A, B, proven={A}))
    assert not found.thorough(A), "others had just entered"
    found.died(on_board(A, C, proven={A}))
    assert found.thorough(A)
    found.died(on_board(A, C, proven={A, C}))
    assert standings(found, A) == [Standing.PRIME], "it was the one that had not ended"


def test_a_death_in_which_all_had_had_results_makes_each_be_tried_to_its_end():
    found = suspects()
    found.died(on_board(A, B))
    found.died(on_board(A, B, proven={A, B}))
    assert found.thorough(A)
    assert found.thorough(B)
    found.answered(A)
    assert not found.thorough(A)


def test_a_prime_suspect_that_has_waited_for_long_is_let_in_before_further_requests():
    trials, board, prime = Trials(), [Visit(Standing.CLEAR), Visit(Standing.CLEAR)], Visit(Standing.PRIME)
    assert trials.arrive(board[0])
    assert not trials.arrive(prime)
    assert trials.arrive(board[1]), "it keeps nobody out at first"
    prime.urgent = True
    later = Visit(Standing.CLEAR)
    assert not trials.arrive(later)
    for visit in board:
        assert trials.admit() == []
        trials.leave(visit)
    assert trials.admit() == [prime]
    trials.leave(prime)
    assert trials.admit() == [later]


def test_a_death_while_one_is_prepared_is_that_ones():
    found = suspects()
    assert found.died(on_board(A, B), {A}, preparing=True)
    assert standings(found, A, B) == [Standing.REFUSED, Standing.CLEAR]


def test_it_is_forgotten_after_a_time_and_bounded():
    now = [0.0]
    found = Suspects(clock=lambda: now[0], memory_s=10.0, capacity=2)
    found.died(on_board(A, B, C))
    assert standings(found, A, B, C) == [Standing.CLEAR, Standing.SUSPECT, Standing.SUSPECT]
    now[0] = 10.0
    assert standings(found, B, C) == [Standing.CLEAR, Standing.CLEAR]
    assert not found


def test_a_request_is_known_again_whatever_its_number_deadline_and_room():
    def job(job_id=1, tokens=b"1234", **more):
        return GenerateJob(job_id, tokens, **({"max_new_tokens": 8, "deadline": 5.0} | more))

    same = [job(), job(2), job(max_new_tokens=9), job(deadline=7.0), job(interactive=False)]
    assert len({fingerprint(one) for one in same}) == 1
    others = [job(), job(tokens=b"4321"), job(grammar="root ::= x"), job(temperature=0.5), embed_job([[1]], 0.0)]
    others += [embed_job([[1, 2]], 0.0), embed_job([[1], [2]], 0.0)]
    assert len({fingerprint(one) for one in others}) == len(others)


@given(
    count=st.integers(1, 12),
    poisonous=st.sets(st.integers(0, 11), max_size=3),
    announced=st.booleans(),
    data=st.data(),
)
def test_every_poisonous_request_is_refused_and_no_other_within_bounded_deaths(count, poisonous, announced, data):
    """Requests on an engine as `Isolation` lets them: suspects one by one beside those that are proven, the prime ones
    alone, the clear ones together. The oracle is the poison itself."""
    found = suspects()
    waiting = dict.fromkeys(bytes([n]) for n in range(count))
    poison = {bytes([n]) for n in poisonous if n < count}
    answered, refused, deaths = set(), set(), dict.fromkeys(waiting, 0)
    crashes = 0
    while waiting:
        assert crashes <= 1 + 3 * len(poison), "it does not come to an end"
        standing = {key: found.standing(key) for key in waiting}
        for key in [key for key in waiting if standing[key] is Standing.REFUSED]:
            del waiting[key]
            refused.add(key)
        clear = [key for key in waiting if standing[key] is Standing.CLEAR]
        suspected = [key for key in waiting if standing[key] is Standing.SUSPECT]
        prime = [key for key in waiting if standing[key] is Standing.PRIME]
        proven = set()
        if suspected:
            order = data.draw(st.permutations(suspected))
            culprit = next((key for key in order if key in poison), None)
            tried = order if culprit is None else order[: order.index(culprit)]
            proven = {key for key in tried if not found.thorough(key)}
            for key in set(tried) - proven:
                # Its trial lasts to its end.
                found.answered(key)
                del waiting[key]
                answered.add(key)
            held = [*proven, *([culprit] if culprit else [])]
        else:
            held = clear or prime[:1]
            culprit = next((key for key in held if key in poison), None)
        if culprit is None:
            for key in held:
                found.answered(key)
                del waiting[key]
                answered.add(key)
            continue
        crashes += 1
        for key in held:
            deaths[key] += 1
        found.died(on_board(*held, proven=proven), set(held) if announced else ())
    assert refused == poison
    assert answered == set(deaths) - poison
    for key in answered:
        assert deaths[key] <= 1 + len(poison), (
            "an innocent one was taken down more often than there are culprits, plus 1"
        )
