"""Pairs of query and document as token ids: only documents are cut, as `tokenizers` itself does with only_second."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.support.cross_encoders import write_tiny
from worker_node.core.errors import ContextLengthExceeded
from worker_node.serving.tokenizing import RowTokenizer

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


async def test_a_pair_has_the_templates_tokens_and_the_place_where_the_document_begins(pairs, directory):
    [pair] = await pairs.encode_pairs("a b", ["c d e"], truncate=False)
    known = Tokenizer.from_file(str(directory / "tokenizer.json")).encode("a b", "c d e")
    assert pair.ids == known.ids
    assert [int(place >= pair.query) for place in range(len(pair.ids))] == known.type_ids


@given(query=st.lists(st.sampled_from("abc"), max_size=12), document=st.lists(st.sampled_from("xyz"), max_size=30))
def test_documents_are_cut_as_only_second_does(directory, query, document):
    query, document = " ".join(query), " ".join(document)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.enable_truncation(LIMIT, strategy="only_second")
    known = tokenizer.encode(query, document)
    pairs = RowTokenizer(directory, LIMIT)
    [pair] = pairs.pairs(query, [document], truncate=True)
    assert (pair.ids, pair.query) == (known.ids, known.type_ids.index(1))


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


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("words", [13, 14, 5000])
async def test_a_query_that_leaves_no_room_is_refused_whatever_is_cut(pairs, truncate, words):
    with pytest.raises(ContextLengthExceeded, match=r"the query takes .* leaves no room for a document") as error:
        await pairs.encode_pairs(" ".join("a" * words), ["b", ""], truncate=truncate)
    assert error.value.param == "query"
