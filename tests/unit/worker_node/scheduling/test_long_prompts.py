"""Long prompts in virtual time: short requests beside them begin soon, and long ones are not starved."""

import pytest

from tests.unit.worker_node.scheduling.virtual import Request, SequenceWorld, SingleWorld

STEP_S, TOKEN_S, STEP_TOKENS = 0.02, 2e-3, 256
FULL_STEP_S = STEP_S + TOKEN_S * STEP_TOKENS
LONG, LONG_S = 8000, 8000 * TOKEN_S


def engine(**more):
    return SequenceWorld(sequences=64, step_s=STEP_S, token_s=TOKEN_S, step_tokens=STEP_TOKENS, **more)


def once(request, after=0.0):
    yield after
    yield request


def each_second(requests):
    """A caller that sends these requests one second after another, whatever becomes of them."""
    return [once(request, float(second)) for second, request in enumerate(requests)]


def call(world, *callers):
    for caller in callers:
        world.call(caller)


def first_tokens(world):
    """When each job got its first token, by job id."""
    at = {}
    emit = world.emit

    def noting(event):
        for delta in getattr(event, "deltas", ()):
            at.setdefault(delta.id, delta.at)
        emit(event)

    world.emit = noting
    return at


def delays(world, at, requests):
    """Seconds from arrival to the first token."""
    ids = {request: job_id for job_id, request in world.jobs.items()}
    return [at[ids[request]] - request.arrived for request in requests]


@pytest.mark.parametrize("interactive", [True, False], ids=["interactive", "batch"])
def test_a_chat_begins_within_three_steps_beside_six_long_prompts(interactive):
    world = engine(max_wait_s=30.0)
    at = first_tokens(world)
    long = [Request(LONG, answer=50, limit=50, interactive=interactive) for _ in range(6)]
    chats = [Request(40, answer=16, limit=64, timeout=30.0) for _ in range(100)]
    call(world, *map(once, long), *each_second(chats))
    world.run(1000)
    assert {request.outcome for request in chats} == {"done"}
    # The step that runs, one that the oldest prompt is owed, and its own.
    assert max(delays(world, at, chats)) <= 3 * FULL_STEP_S
    assert {request.outcome for request in long} == {"done"}
    assert max(request.ended for request in long) < 6 * LONG_S * 2


def test_the_wait_that_a_chat_is_told_leaves_long_prompts_out():
    world = engine(max_wait_s=30.0)
    at = first_tokens(world)
    call(world, *(once(Request(LONG, answer=20, limit=20)) for _ in range(6)))
    # Measured once, the speed is known: six such prompts are 100 s of work.
    chats = [Request(40, answer=4, limit=16, timeout=10.0) for _ in range(60)]
    call(world, *(once(chat, 20.0 + second) for second, chat in enumerate(chats)))
    late = Request(LONG, answer=1, limit=1)
    call(world, once(late, 30.0))
    world.run(1000)
    assert {request.outcome for request in chats} == {"done"}
    assert max(request.predicted for request in chats) < 3 * FULL_STEP_S
    assert max(delays(world, at, chats)) <= 3 * FULL_STEP_S
    assert late.outcome == "refused", "it would wait for the long prompts before it"
    assert late.predicted > 2 * LONG_S


def test_endless_short_prompts_leave_a_quarter_to_the_oldest_long_one():
    world = engine()
    long = [Request(LONG, answer=1, limit=1) for _ in range(2)]

    def flood():
        while True:
            yield Request(200, answer=1, limit=1)

    call(world, *map(once, long), *(flood() for _ in range(20)))
    world.run(300)
    alone = LONG / STEP_TOKENS * FULL_STEP_S
    assert alone * 3 < long[0].ended < alone * 5
    assert long[1].ended < alone * 10


def test_a_chat_goes_before_long_prompts_where_one_answer_runs_at_a_time():
    world = SingleWorld(prompt_s=1e-3, token_s=0.03)
    long = [Request(LONG, answer=5, limit=5) for _ in range(6)]
    chat = Request(40, answer=5, limit=5)
    call(world, *map(once, long), once(chat, 1.0))
    world.run(1000)
    assert chat.ended < long[1].ended, "the prompt that is being computed cannot be interrupted"
    assert {request.outcome for request in world.requests} == {"done"}
