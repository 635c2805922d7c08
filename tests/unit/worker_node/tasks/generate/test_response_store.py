"""The store of responses alone: its bounds in number, bytes and time, and whose is what."""

import random

from worker_node.tasks.generate.http.response_store import ResponseStore, StoredItem, StoredResponse, StoreLimits

ANN, BOB = b"ann", b"bob"


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def response(name, *earlier, size=10, status="completed"):
    item = StoredItem(f"msg_{name}", b"x" * size)
    return StoredResponse(f"resp_{name}", status, b"{}", earlier, (item,))


def store(count=10, size=1_000_000, seconds=60.0, clock=None):
    return ResponseStore(StoreLimits(count, size, seconds), clock or Clock())


def test_it_forgets_after_the_time():
    clock = Clock()
    kept = store(clock=clock, seconds=60)
    kept.put(ANN, response("a"))
    clock.now = 59.0
    kept.put(ANN, response("b", *kept.get(ANN, "resp_a").items))
    clock.now = 60.0
    assert kept.get(ANN, "resp_a") is None
    assert kept.items(ANN, ["msg_a", "msg_b"]).keys() == {"msg_a", "msg_b"}
    clock.now = 119.0
    kept.expire()
    assert (kept.count, kept.size) == (0, 0)


def test_the_oldest_goes_first():
    kept = store(count=2)
    for name in "abc":
        kept.put(ANN, response(name))
    assert [kept.get(ANN, f"resp_{name}") is not None for name in "abc"] == [False, True, True]


def test_what_is_larger_than_everything_is_not_stored():
    kept = store(size=5000)
    kept.put(ANN, response("a"))
    assert not kept.put(ANN, response("b", size=5000))
    assert kept.get(ANN, "resp_a") is not None


def test_the_same_item_id_with_other_content_changes_no_earlier_response():
    kept = store()
    kept.put(ANN, response("a", StoredItem("mine", b"one")))
    kept.put(ANN, response("b", StoredItem("mine", b"two")))
    assert kept.get(ANN, "resp_a").input[0].data == b"one"
    assert kept.get(ANN, "resp_b").input[0].data == b"two"
    assert kept.items(ANN, ["mine"])["mine"].data == b"two"


def test_its_accounts_hold_under_random_use():
    chance, clock = random.Random(7), Clock()
    kept = store(count=20, size=20_000, seconds=30, clock=clock)
    for step in range(3000):
        clock.now += chance.random()
        owner, name = chance.choice([ANN, BOB, b"eve"]), str(chance.randrange(60))
        if chance.random() < 0.2:
            kept.delete(owner, f"resp_{name}")
        else:
            earlier = kept.get(owner, f"resp_{chance.randrange(60)}")
            kept.put(owner, response(name, *(earlier.items if earlier else ()), size=chance.randrange(3000)))
        assert kept.count <= 20, step
        assert 0 <= kept.size <= 20_000, step
    clock.now += 31
    kept.expire()
    assert (kept.count, kept.size) == (0, 0)
