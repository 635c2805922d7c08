"""Cohere's own client against the node at NODE_URL, with both versions of its API. Status 0 if all is right."""

import os

import cohere

URL = os.environ["NODE_URL"]
QUERY, DOCUMENTS = "how tall is the tower", ["The tower is 330 metres tall.", "Bananas are yellow.", "ok"]

first = cohere.Client(api_key="unused", base_url=URL)
second = cohere.ClientV2(api_key="unused", base_url=URL)

for client in (first, second):
    reply = client.rerank(model="one", query=QUERY, documents=DOCUMENTS, top_n=2)
    assert len(reply.results) == 2, reply
    assert reply.results[0].relevance_score >= reply.results[1].relevance_score, reply
    assert all(0 <= result.relevance_score <= 1 for result in reply.results), reply
    assert reply.id, reply
    assert reply.meta.api_version.version == ("1" if client is first else "2"), reply

given = first.rerank(model="one", query=QUERY, documents=[{"text": text} for text in DOCUMENTS], return_documents=True)
assert sorted(result.document.text for result in given.results) == sorted(DOCUMENTS), given
cut = second.rerank(model="one", query=QUERY, documents=["tower " * 5000], max_tokens_per_doc=64)
assert len(cut.results) == 1, cut

for wanted, expected in (
    ({"model": "no-such-model", "query": QUERY, "documents": DOCUMENTS}, cohere.NotFoundError),
    ({"model": "one", "query": QUERY, "documents": []}, cohere.BadRequestError),
):
    try:
        second.rerank(**wanted)
    except expected as error:
        message = error.body["message"]
    else:
        raise AssertionError(f"{expected.__name__} was not raised")
    assert message, wanted

print("all as expected")
