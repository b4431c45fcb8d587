"""Tests of ``LLM.explain``: how much of a prompt is cached, under which salt, and why no more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from radixkv.errors import InvalidRequest
from radixkv.llm import LLM
from radixkv.sampling import SamplingParams

TOKEN = SamplingParams(max_tokens=1)
TEXT = "A farmer has 12 hens, and each of them lays 5 eggs a week. How many eggs does he get in a month?"


@pytest.fixture
def llm(sensitive: Path) -> Iterator[LLM]:
    llm = LLM(sensitive, max_total_tokens=1024, max_model_len=256)
    yield llm
    llm.shutdown()


def test_it_explains_where_a_match_ends(llm: LLM) -> None:
    (output,) = llm.generate(TEXT, TOKEN)
    assert llm.explain(TEXT).reason == "whole"
    ids = output.prompt_token_ids
    found = llm.explain([*ids[:20], 7, *ids[21:]])
    assert (found.n_tokens, found.n_cached, found.reason) == (len(ids), 16, "differs")
    assert (found.first_difference, found.token, found.cached_token) == (20, 7, ids[20])
    with pytest.raises(InvalidRequest, match="token id 1000000000"):
        llm.explain([10**9])


@pytest.mark.parametrize("n_tokens", [1, 15, 16, 17, 48])
def test_it_counts_what_a_request_gets(llm: LLM, n_tokens: int) -> None:
    prompt = list(range(3, 3 + n_tokens))
    llm.generate(prompt, TOKEN)
    explained = llm.explain(prompt)
    (output,) = llm.generate(prompt, TOKEN)
    assert explained.n_cached == output.num_cached_tokens


def test_it_uses_the_prompts_own_salt_or_else_the_argument(llm: LLM) -> None:
    salted = {"prompt": TEXT, "cache_salt": "mine"}
    llm.generate(salted, TOKEN)
    assert llm.explain(salted).reason == "whole"
    assert llm.explain(salted, cache_salt="other").reason == "whole"
    assert llm.explain(TEXT, cache_salt="mine").reason == "whole"
    assert llm.explain({"prompt": TEXT}, cache_salt="mine").reason == "whole"
    assert llm.explain({"prompt": TEXT, "cache_salt": None}, cache_salt="mine").reason == "whole"
    for elsewhere in (llm.explain(TEXT), llm.explain(TEXT, cache_salt="other")):
        assert (elsewhere.n_cached, elsewhere.reason) == (0, "other_namespace")


@pytest.mark.parametrize("salt", [5, None, b"mine"])
def test_a_salt_that_is_not_a_string_is_rejected(llm: LLM, salt: object) -> None:
    with pytest.raises(InvalidRequest, match=f"cache_salt is {salt}"):
        llm.explain(TEXT, cache_salt=salt)
