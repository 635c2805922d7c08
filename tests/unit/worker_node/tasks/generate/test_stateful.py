"""What the NPU's generation engine does between tokens, over a scripted pipeline of GenAI's shape."""

import math
from types import SimpleNamespace

import numpy as np
import openvino_genai as genai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_node.core.types import Device, ModelKind
from worker_node.engines.protocol import DeviceBroken, EngineSpec, EngineStats, Failed, NativeCall
from worker_node.tasks.generate import stateful
from worker_node.tasks.generate.messages import GenerateJob, Sampling, Step
from worker_node.tasks.generate.prefixes import ChunkCache
from worker_node.tasks.generate.stateful import StatefulRunner

FAR = 1e12
REASON = genai.GenerationFinishReason


class Pipeline:
    """Answers n, n+1, n+2 … after a prompt that begins with n, up to `room` tokens; 0 is the end token."""

    made = None

    def __init__(self, _path, _device, **properties):
        Pipeline.made = self
        self.cache = properties.get("NPUW_LLM_PREFIX_CACHING_MAX_NUM_BLOCKS")
        self.room = 20
        self.error = None
        self.generated = 0

    def get_generation_config(self):
        config = genai.GenerationConfig()
        config.set_eos_token_id(0)
        return config

    def generate(self, inputs, config, streamer):
        assert np.all(inputs.attention_mask.data == 1)
        first = int(inputs.input_ids.data[0, 0])
        if self.error:
            raise RuntimeError(self.error)
        reason = REASON.NONE
        for count in range(1, self.room + 1):
            self.generated += 1
            token = max(0, first - count)
            if streamer.write([token]) == genai.StreamingStatus.CANCEL:
                break
            if token == 0:
                reason = REASON.STOP
                break
            if count == config.max_new_tokens:
                reason = REASON.LENGTH
                break
        streamer.end()
        return SimpleNamespace(finish_reasons=[reason])


class Rig:
    """A loaded runner, what it emitted, and commands that arrive after so many tokens."""

    def __init__(self, **options):
        options = {"max_prompt_len": 64, "min_response_len": 64, **options}
        self.runner = StatefulRunner(
            EngineSpec("m", ModelKind.GENERATION, "/m", Device.NPU, "generation_stateful", options, emulated=True)
        )
        self.runner.load()
        self.events, self.calls = [], []
        self.arrivals = {}
        self.tokens = 0

    def poll(self):
        self.tokens += 1
        if (command := self.arrivals.pop(self.tokens, None)) is not None:
            command()

    def run(self):
        while self.runner.has_work:
            self.runner.step(self.emit, self.poll)

    def emit(self, event):
        (self.calls if isinstance(event, NativeCall) else self.events).append(event)

    def answer(self, job_id):
        deltas = self.deltas(job_id)
        return [token for d in deltas for token in d.tokens], [d.finish for d in deltas if d.finish]

    def deltas(self, job_id):
        return [d for event in self.events if isinstance(event, Step) for d in event.deltas if d.id == job_id]

    def failures(self):
        return {event.id: event.code for event in self.events if isinstance(event, Failed)}


@pytest.fixture(autouse=True)
def scripted_pipeline(monkeypatch):
    monkeypatch.setattr(stateful.genai, "LLMPipeline", Pipeline)


@pytest.fixture
def rig():
    return Rig()


def test_each_prefill_is_announced_with_its_size_and_its_job(rig):
    rig.runner.submit(job(1, length=30))
    rig.runner.submit(job(2, length=5))
    rig.runner.submit(job(3, length=65))
    rig.run()
    assert rig.calls == [NativeCall("prefill", 30, [1]), NativeCall("prefill", 5, [2])]


def job(job_id, first=100, length=3, deadline=FAR, max_new_tokens=1000, **more):
    tokens = np.full(length, first, "<i4").tobytes()
    return GenerateJob(job_id, tokens, max_new_tokens, deadline, **more)


@pytest.mark.parametrize(
    ("wanted", "tokens", "finish"),
    [
        ({"first": 3}, [2, 1, 0], "stop"),
        ({"max_new_tokens": 4}, [99, 98, 97, 96], "length"),
        ({}, list(range(99, 79, -1)), "length"),
    ],
    ids=["end token", "as many as asked for", "the KV cache is full, for which GenAI gives no reason"],
)
def test_an_answer_ends_with_its_reason(rig, wanted, tokens, finish):
    rig.runner.submit(job(1, **wanted))
    rig.run()
    assert rig.answer(1) == (tokens, [finish])
    assert rig.events[0].deltas[0].started is not None
    assert rig.runner.stats() == EngineStats()


def test_jobs_that_arrive_between_tokens_are_served_in_turn_interactive_first(rig):
    rig.runner.submit(job(1, max_new_tokens=5))
    later = [job(2, max_new_tokens=1, interactive=False), job(3, max_new_tokens=1)]
    rig.arrivals[2] = lambda: [rig.runner.submit(one) for one in later]
    rig.run()
    order = [delta.id for event in rig.events for delta in event.deltas if delta.finish]
    assert order == [1, 3, 2]


def test_a_cancelled_generation_ends_at_once_and_says_no_more(rig):
    rig.runner.submit(job(1))
    rig.runner.submit(job(2, max_new_tokens=1))
    rig.arrivals[3] = lambda: rig.runner.cancel(1)
    rig.run()
    assert rig.answer(1) == ([99, 98, 97], [])
    assert rig.answer(2) == ([99], ["length"])
    assert Pipeline.made.generated == 4


def test_a_deadline_is_kept_in_the_queue_and_between_tokens(rig, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(stateful.time, "monotonic", lambda: now[0])
    rig.runner.submit(job(1, deadline=50.0))
    rig.runner.submit(job(2, deadline=10.0))
    rig.arrivals[2] = lambda: now.__setitem__(0, 60.0)
    rig.run()
    assert rig.answer(1) == ([99, 98], [])
    assert rig.failures() == {1: "deadline_exceeded", 2: "deadline_exceeded"}
    assert Pipeline.made.generated == 2


def test_a_stream_that_has_begun_goes_on_after_its_deadline_until_it_must_end(rig, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(stateful.time, "monotonic", lambda: now[0])
    rig.runner.submit(job(1, deadline=50.0, streamed_until=math.inf))
    rig.runner.submit(job(2, deadline=80.0, streamed_until=100.0))
    rig.arrivals[2] = lambda: now.__setitem__(0, 60.0)
    rig.arrivals[22] = lambda: now.__setitem__(0, 90.0)
    rig.arrivals[24] = lambda: now.__setitem__(0, 100.0)
    rig.run()
    assert rig.answer(1) == (list(range(99, 79, -1)), ["length"])
    assert rig.answer(2) == ([99, 98, 97, 96], [])
    assert rig.failures() == {2: "deadline_exceeded"}


def test_the_end_of_the_edge_in_mid_answer_passes_through_without_harming_the_pipeline(rig):
    def gone():
        raise EOFError

    rig.runner.submit(job(1))
    rig.arrivals[2] = gone
    with pytest.raises(EOFError):
        rig.run()
    assert Pipeline.made.generated == 2
    rig.runner.submit(job(2, max_new_tokens=1))
    rig.run()
    assert rig.answer(2) == ([99], ["length"])


def test_every_token_tells_whether_others_are_known_to_have_used_the_npu(tmp_path):
    counter = tmp_path / "npu_busy_time_us"
    counter.write_text("1000\n")
    rig = Rig(busy_counter=str(counter))
    rig.runner.submit(job(1, max_new_tokens=4))
    rig.arrivals[2] = lambda: counter.write_text("60001000\n")
    rig.run()
    told = [(delta.busy.us, delta.busy.shared) for event in rig.events for delta in event.deltas]
    assert told == [(0, False)] * 2 + [(60_000_000, True)] * 3


def test_what_genai_would_refuse_is_refused_before_it_runs(rig):
    rig.runner.submit(job(1, length=65))
    rig.runner.submit(job(2, sampling=Sampling(logprobs=True)))
    rig.runner.submit(job(3, max_new_tokens=0))
    rig.run()
    assert rig.failures() == {1: "context_length_exceeded", 2: "unsupported_parameter", 3: "invalid_request"}
    assert Pipeline.made.generated == 0


def test_a_device_that_fails_in_a_run_is_not_used_again(rig):
    Pipeline.made.error = "Exception from x.cpp:1:\nZE_RESULT_ERROR_DEVICE_LOST, code 0x70000001\n\n"
    rig.runner.submit(job(1))
    with pytest.raises(DeviceBroken, match="DEVICE_LOST"):
        rig.run()


# The prefix cache, in chunks of 16 tokens.


@pytest.fixture
def caching():
    return Rig(prefill_chunk_size=16, prefix_cache_max_num_blocks=5)


def cached(rig, job_id):
    """The tokens from the cache, the same in all parts of an answer, and the prefilled ones that the first tells."""
    deltas = rig.deltas(job_id)
    assert len({delta.cached for delta in deltas}) == 1
    return deltas[0].cached, deltas[0].prefilled


@pytest.mark.parametrize(
    ("length", "again"),
    [(5, 0), (16, 0), (17, 16), (32, 16), (33, 32), (64, 48)],
)
def test_a_repeated_prompt_is_taken_from_the_cache_but_for_its_last_chunk(caching, length, again):
    for number in (1, 2):
        caching.runner.submit(job(number, length=length, max_new_tokens=1))
    caching.run()
    assert Pipeline.made.cache == 5
    assert (cached(caching, 1), cached(caching, 2)) == ((0, length), (again, length - again))
    stats = caching.runner.stats()
    assert (stats.prefix_asked_tokens, stats.prefix_hit_tokens) == (2 * length, again)


def test_a_cancelled_prompt_was_computed_to_its_end_and_one_that_never_ran_was_not(caching):
    caching.runner.submit(job(1, length=40))
    caching.runner.submit(job(2, first=50, length=40))
    caching.arrivals[1] = lambda: [caching.runner.cancel(1), caching.runner.cancel(2)]
    caching.run()
    caching.runner.submit(job(3, length=40, max_new_tokens=1))
    caching.runner.submit(job(4, first=50, length=40, max_new_tokens=1))
    caching.run()
    assert (cached(caching, 3)[0], cached(caching, 4)[0]) == (32, 0)


def test_the_cache_forgets_what_was_used_least_recently(caching):
    for number, first in enumerate((100, 50, 30, 100), start=1):
        caching.runner.submit(job(number, first=first, length=40, max_new_tokens=1))
        caching.run()
    assert cached(caching, 4)[0] == 16, "five blocks: the last one of the first prompt made room"


def test_what_is_computed_ahead_is_no_prompt_of_a_caller(caching):
    ahead = job(1, length=40, interactive=False, internal=True)
    for end in (16, 32):
        caching.runner.submit(ahead.beginning(end))
        caching.run()
    assert caching.runner.stats().prefix_asked_tokens == 0
    caching.runner.submit(job(2, length=40, max_new_tokens=1))
    caching.run()
    assert cached(caching, 2)[0] == 32


def test_an_engine_without_a_prefix_cache_knows_of_none(rig):
    rig.runner.submit(job(1, max_new_tokens=1))
    rig.run()
    assert cached(rig, 1)[0] is None


@given(
    prompts=st.lists(st.text("abc", min_size=1, max_size=8), min_size=1, max_size=30),
    most=st.integers(1, 12),
    tail=st.integers(0, 3),
)
def test_no_more_is_found_than_was_computed_and_what_has_room_is_found_again(prompts, most, tail):
    """Prompts of chunks of four tokens, a letter each, with a tail that is no whole chunk; a window of eight chunks."""
    cache, computed = ChunkCache(most, chunk=4, window=32), set()
    for letters in prompts:
        tokens = np.array([ord(letter) for letter in letters for _ in range(4)] + [0] * tail, "<i4")[:32]
        hit = cache.look_up(tokens.tobytes())
        assert hit % 4 == 0
        assert hit == 0 or letters[: hit // 4] in computed
        assert hit < len(tokens), "the first token of the answer needs a chunk"
        cache.computed(tokens.tobytes(), hit)
        assert len(cache._blocks) <= most
        if most >= len(letters):
            assert cache.look_up(tokens.tobytes()) == min((len(tokens) - 1) // 4, 7) * 4
        computed |= {letters[:end] for end in range(len(letters) + 1)}


def test_a_prompt_that_is_larger_than_the_cache_keeps_its_beginning():
    cache = ChunkCache(most=2, chunk=4, window=64)
    tokens = np.arange(40, dtype="<i4").tobytes()
    cache.computed(tokens, cache.look_up(tokens))
    assert (cache.look_up(tokens), len(cache._blocks)) == (8, 2)
