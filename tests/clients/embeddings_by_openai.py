"""Tests of ``/v1/embeddings`` with the installed major version of the openai package, which asks for base64."""

from __future__ import annotations

import math
import os

import openai
import pytest
from openai import OpenAI

TEXT = "The rain in Spain stays mainly in the plain. " * 20


@pytest.fixture(scope="module")
def client() -> OpenAI:
    return OpenAI(base_url=os.environ["SERVER"] + "/v1", api_key=os.environ["KEY"], max_retries=0, timeout=60)


def test_texts_have_embeddings_in_their_order(client: OpenAI) -> None:
    both = client.embeddings.create(model="embedded", input=[TEXT, "Hello"])
    (alone,) = client.embeddings.create(model="embedded", input="Hello").data
    assert [one.index for one in both.data] == [0, 1]
    assert both.data[1].embedding == alone.embedding != both.data[0].embedding
    assert math.hypot(*alone.embedding) == pytest.approx(1, abs=1e-5)
    assert both.model == "embedded"
    assert both.usage.prompt_tokens == both.usage.total_tokens > 20


def test_floats_are_the_values_in_base64(client: OpenAI) -> None:
    by_base64, by_float = (
        client.embeddings.create(model="embedded", input=TEXT, **settings).data[0].embedding
        for settings in ({}, {"encoding_format": "float"})
    )
    assert list(by_base64) == by_float


def test_token_ids_and_dimensions(client: OpenAI) -> None:
    found = client.embeddings.create(model="embedded", input=[[5, 6, 7], [8, 9]], dimensions=4)
    assert [len(one.embedding) for one in found.data] == [4, 4]
    assert math.hypot(*found.data[0].embedding) == pytest.approx(1, abs=1e-5)


def test_errors_are_those_of_openai(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.embeddings.create(model="embedded", input="Hello", dimensions=1_000_000)
    assert refused.value.param == "dimensions"
    with pytest.raises(openai.BadRequestError, match="--task generate"):
        client.completions.create(model="embedded", prompt="Hello")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="other", input="Hello")
