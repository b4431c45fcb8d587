"""Tests of ``/v2/rerank`` and ``/v1/rerank`` with Cohere's clients."""

from __future__ import annotations

import os

import cohere
import pytest
from cohere.errors import BadRequestError, NotFoundError

QUERY = "Who lays eggs?"
DOCUMENTS = ["Hens lay eggs.", "Cows give milk.", "The rain in Spain stays mainly in the plain. " * 5]


@pytest.fixture(scope="module")
def client() -> cohere.ClientV2:
    return cohere.ClientV2(api_key=os.environ["KEY"], base_url=os.environ["SERVER"], timeout=60)


def test_results_are_sorted_and_have_no_documents(client: cohere.ClientV2) -> None:
    reply = client.rerank(model="embedded", query=QUERY, documents=DOCUMENTS)
    scores = [one.relevance_score for one in reply.results]
    assert sorted(one.index for one in reply.results) == [0, 1, 2]
    assert scores == sorted(scores, reverse=True)
    assert all(0 < score < 1 for score in scores)
    assert reply.id
    assert reply.meta is not None
    assert reply.meta.api_version is not None
    assert reply.meta.api_version.version == "2"


def test_the_best_are_those_of_all(client: cohere.ClientV2) -> None:
    every = client.rerank(model="embedded", query=QUERY, documents=DOCUMENTS).results
    best = client.rerank(model="embedded", query=QUERY, documents=DOCUMENTS, top_n=2).results
    assert [(one.index, one.relevance_score) for one in best] == [
        (one.index, one.relevance_score) for one in every[:2]
    ]


def test_the_first_client_gets_documents_back(client: cohere.ClientV2) -> None:
    """It takes documents as objects, too."""
    older = cohere.Client(api_key=os.environ["KEY"], base_url=os.environ["SERVER"], timeout=60)
    documents = [DOCUMENTS[0], {"text": DOCUMENTS[1]}]
    reply = older.rerank(model="embedded", query=QUERY, documents=documents, return_documents=True)
    for one in reply.results:
        assert one.document is not None
        assert one.document.text == DOCUMENTS[one.index]
    by_index = {one.index: one.relevance_score for one in reply.results}
    newer = client.rerank(model="embedded", query=QUERY, documents=DOCUMENTS[:2]).results
    assert by_index == {one.index: one.relevance_score for one in newer}


def test_a_megabyte_of_documents_is_read(client: cohere.ClientV2) -> None:
    """The last one is longer than the context, so that none is computed."""
    documents = ["x" * 500] * 2047 + ["x" * 100_000]
    with pytest.raises(BadRequestError, match=r"documents\[2047\]"):
        client.rerank(model="embedded", query=QUERY, documents=documents)


def test_errors_are_those_of_cohere(client: cohere.ClientV2) -> None:
    with pytest.raises(NotFoundError):
        client.rerank(model="other", query=QUERY, documents=DOCUMENTS)
    with pytest.raises(BadRequestError, match="max_tokens_per_doc"):
        client.rerank(model="embedded", query=QUERY, documents=DOCUMENTS, max_tokens_per_doc=5)
