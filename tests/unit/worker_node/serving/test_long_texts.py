"""Texts far over a model's limit: the tokens of the whole text for little work, and never beyond a deadline."""

import asyncio
import threading
import time

import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors

from worker_node.core.errors import BadRequest, ContextLengthExceeded, DeadlineExceeded, Overloaded
from worker_node.serving import tokenizing
from worker_node.serving.tokenizing import RowTokenizer, TokenizingThreads, beginning

LIMIT = 16


class Counted:
    """A tokenizer that adds up the characters it is given."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.characters = 0

    def encode_batch_fast(self, texts, **how):
        self.characters += sum(map(len, texts))
        return self._tokenizer.encode_batch_fast(texts, **how)


class UntilAbandoned:
    """Work in a thread that goes on for as long as somebody waits for it."""

    def __init__(self):
        self.begun, self.left = threading.Event(), threading.Event()

    def __call__(self, go_on):
        self.begun.set()
        try:
            while True:
                go_on()
                time.sleep(0.001)
        finally:
            self.left.set()


@pytest.fixture(scope="module")
def whole():
    words = {word: index for index, word in enumerate(["[UNK]", "[CLS]", "[SEP]", "a", "b", "c", "##a", "##b", "é"])}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(strip_accents=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return tokenizer


@pytest.fixture(scope="module")
def embedder(whole, tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    whole.save(str(directory / "tokenizer.json"))
    return RowTokenizer(directory, LIMIT)


@pytest.mark.parametrize("text", ["ab" * 4_000_000, " " * 8_000_000 + "a"], ids=["one word", "white space"])
def test_of_a_text_with_next_to_no_tokens_a_million_characters_are_looked_at(whole, text):
    counted = Counted(whole)
    with pytest.raises(BadRequest, match=r"the first 1000000 characters of a text of 800000. have only [01] tokens"):
        beginning(counted, text, LIMIT, 256)
    assert counted.characters < 1_500_000
    assert beginning(whole, text[:1_000_000], LIMIT, 256) == text[:1_000_000]


async def test_ordinary_requests_do_not_wait_for_very_large_ones():
    threads, proceed = TokenizingThreads(), threading.Event()
    forever = time.monotonic() + 60
    large = [asyncio.create_task(threads.run(lambda _: proceed.wait(10), 1_000_000, forever)) for _ in range(3)]
    assert await threads.run(lambda _: "done", 10_000, forever) == "done"
    assert not any(task.done() for task in large)
    proceed.set()
    assert await asyncio.gather(*large) == [True] * 3


async def test_tokens_are_counted_up_to_a_size_and_beyond_it_only_found_too_many(embedder):
    with pytest.raises(ContextLengthExceeded, match=r"texts\[1\] has 20002 tokens") as counted:
        await embedder.encode(["a", "a " * 20_000], truncate=False)
    with pytest.raises(ContextLengthExceeded, match=r"texts\[1\] has more than 16 tokens") as found:
        await embedder.encode(["a", "a " * 2_000_000], truncate=False)
    assert (counted.value.param, found.value.param) == ("texts[1]", "texts[1]")


async def test_a_deadline_ends_the_wait_for_a_thread_and_the_work_in_it(embedder, monkeypatch):
    threads = TokenizingThreads()
    monkeypatch.setattr(tokenizing, "THREADS", threads)
    work = UntilAbandoned()
    working = asyncio.create_task(threads.run(work, 10, time.monotonic() + 3.0))
    await asyncio.to_thread(work.begun.wait, 10)
    with pytest.raises(DeadlineExceeded):
        await working
    assert await asyncio.to_thread(work.left.wait, 10)
    with pytest.raises(DeadlineExceeded):
        await embedder.encode(["a " * 30_000], truncate=True, deadline=time.monotonic() - 1)


async def test_more_characters_than_may_wait_are_refused_and_one_request_never_is():
    threads, proceed = TokenizingThreads(max_characters=100), threading.Event()
    forever = time.monotonic() + 60
    first = asyncio.create_task(threads.run(lambda _: proceed.wait(10), 1000, forever))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="1000 characters wait to be tokenized; the bound here is 100"):
        await threads.run(lambda _: None, 1, forever)
    proceed.set()
    assert await first
    await asyncio.sleep(0)
    assert await threads.run(lambda _: "next", 50, forever) == "next"
