"""Texts and pairs to token ids: only documents are cut, and of texts far over the limit little is read."""

import asyncio
import json
import threading
import time

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from tests.support.cross_encoders import write_tiny
from worker_node.core.errors import BadRequest, ContextLengthExceeded, DeadlineExceeded, Overloaded
from worker_node.serving import row_tokenizer
from worker_node.serving.row_tokenizer import RowTokenizer, TokenizingThreads, beginning

LIMIT = 16


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    target = tmp_path_factory.mktemp("tokenizer") / "model"
    write_tiny(target)
    content = json.loads((target / "tokenizer.json").read_text())
    content["truncation"] = content["padding"] = None
    (target / "tokenizer.json").write_text(json.dumps(content))
    return target


@pytest.fixture(scope="module")
def pairs(directory):
    return RowTokenizer(directory, LIMIT)


@given(query=st.lists(st.sampled_from("abc"), max_size=12), document=st.lists(st.sampled_from("xyz"), max_size=30))
def test_pairs_have_the_templates_tokens_and_documents_are_cut_as_only_second_does(directory, query, document):
    query, document = " ".join(query), " ".join(document)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.enable_truncation(LIMIT, strategy="only_second")
    known = tokenizer.encode(query, document)
    pairs = RowTokenizer(directory, LIMIT)
    [pair] = pairs.pairs(query, [document], truncate=True)
    assert (pair.ids, pair.query) == (known.ids, known.type_ids.index(1))


@given(st.lists(st.lists(st.sampled_from("abc"), max_size=30), max_size=4))
def test_texts_are_cut_as_tokenizers_does(directory, texts):
    texts = [" ".join(words) for words in texts]
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.enable_truncation(LIMIT)
    assert RowTokenizer(directory, LIMIT).rows(texts, truncate=True) == [tokenizer.encode(text).ids for text in texts]


async def test_a_document_is_cut_to_its_own_limit_before_the_models(pairs):
    [short] = await pairs.encode_pairs("a", ["b c d e"], truncate=False, max_document_tokens=2)
    [same] = await pairs.encode_pairs("a", ["b c"], truncate=False)
    assert short == same


async def test_a_document_that_is_too_long_is_named_with_its_lengths(pairs):
    [longest] = await pairs.encode_pairs("a", [" ".join("c" * (LIMIT - 4))], truncate=False)
    assert len(longest.ids) == LIMIT
    with pytest.raises(ContextLengthExceeded, match=r"has 13 tokens, 17 with the query"):
        await pairs.encode_pairs("a", [" ".join("c" * (LIMIT - 3))], truncate=False)
    with pytest.raises(
        ContextLengthExceeded, match=r"texts\[1\] has 20 tokens, 24 with the query.* at most 16"
    ) as error:
        await pairs.encode_pairs("a", ["b", " ".join("c" * 20)], truncate=False, field="texts")
    assert error.value.param == "texts[1]"
    with pytest.raises(ContextLengthExceeded, match=r"documents\[70\] has 20 tokens"):
        await pairs.encode_pairs("a", ["b"] * 70 + [" ".join("c" * 20)], truncate=False)


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("words", [13, 14, 5000])
async def test_a_query_that_leaves_no_room_is_refused_whatever_is_cut(pairs, truncate, words):
    with pytest.raises(ContextLengthExceeded, match=r"the query takes .* leaves no room for a document") as error:
        await pairs.encode_pairs(" ".join("a" * words), ["b", ""], truncate=truncate)
    assert error.value.param == "query"


async def test_token_ids_are_those_of_the_vocabulary(pairs):
    last = pairs.whole.get_vocab_size() - 1
    assert await pairs.encode([(0, last)], truncate=False) == [[0, last]]
    for ids in ((last + 1,), (-1,), ()):
        with pytest.raises(BadRequest):
            await pairs.encode([ids], truncate=False)


class Counted:
    """A tokenizer that adds up the characters it is given."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.characters = 0

    def encode_batch_fast(self, texts, **how):
        self.characters += sum(map(len, texts))
        return self._tokenizer.encode_batch_fast(texts, **how)


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
    monkeypatch.setattr(row_tokenizer, "THREADS", threads)
    begun, left = threading.Event(), threading.Event()

    def work(go_on):
        begun.set()
        try:
            while True:
                go_on()
                time.sleep(0.001)
        finally:
            left.set()

    working = asyncio.create_task(threads.run(work, 10, time.monotonic() + 3.0))
    await asyncio.to_thread(begun.wait, 10)
    with pytest.raises(DeadlineExceeded):
        await working
    assert await asyncio.to_thread(left.wait, 10)
    with pytest.raises(DeadlineExceeded):
        await embedder.encode(["a " * 30_000], truncate=True, deadline=time.monotonic() - 1)


async def test_a_request_that_leaves_before_its_turn_takes_no_place_from_later_ones():
    threads, proceed = TokenizingThreads(max_characters=100), threading.Event()
    forever = time.monotonic() + 60
    first = asyncio.create_task(threads.run(lambda _: proceed.wait(10), 40, forever))
    await asyncio.sleep(0)
    with pytest.raises(DeadlineExceeded):
        await threads.run(lambda _: None, 60, time.monotonic() + 0.05)
    await asyncio.sleep(0)
    later = asyncio.create_task(threads.run(lambda _: "later", 60, forever))
    await asyncio.sleep(0)
    proceed.set()
    assert (await first, await later) == (True, "later")


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


async def test_many_short_texts_are_tokenized_in_a_thread_like_a_long_one(embedder, monkeypatch):
    threads = []
    monkeypatch.setattr(embedder, "rows", lambda *_: threads.append(threading.current_thread()))
    for texts in (["a"] * 64, ["a"] * 2048, ["a" * 9_000]):
        await embedder.encode(texts, truncate=True)
    assert [thread is threading.main_thread() for thread in threads] == [True, False, False]
