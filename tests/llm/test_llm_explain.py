"""Tests of ``LLM.explain``: how much of a prompt is cached, under which salt, and why no more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from radixkv.errors import InvalidRequest
from radixkv.llm import LLM
from radixkv.wire.sampling import SamplingParams
from support.cases import covering

TOKEN = SamplingParams(max_tokens=1)
TEXT = "A farmer has 12 hens, and each of them lays 5 eggs a week. How many eggs does he get in a month?"


@pytest.fixture
def llm(sensitive: Path) -> Iterator[LLM]:
    with LLM(sensitive, max_total_tokens=1024, max_model_len=256) as llm:
        yield llm


def test_it_explains_where_a_match_ends(llm: LLM) -> None:
    (output,) = llm.generate(TEXT, TOKEN)
    assert llm.explain(TEXT).reason == "whole"
    ids = output.prompt_token_ids
    found = llm.explain([*ids[:20], 7, *ids[21:]])
    assert (found.n_tokens, found.n_cached, found.reason) == (len(ids), 20, "differs")
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


@pytest.mark.parametrize(
    ("shared_and_cached", "n_after"),
    covering([(3, 0), (4, 4), (15, 15), (16, 16), (19, 16), (20, 20), (40, 40)], [1, 30]),
)
def test_it_counts_the_part_of_a_page_that_a_request_copies(
    llm: LLM, shared_and_cached: tuple[int, int], n_after: int
) -> None:
    n_shared, n_cached = shared_and_cached
    llm.flush_cache()
    prompt = list(range(3, 51))
    llm.generate(prompt, TOKEN)
    branch = prompt[:n_shared] + [1] * n_after
    explained = llm.explain(branch)
    (output,) = llm.generate(branch, TOKEN)
    assert explained.n_cached == output.num_cached_tokens == n_cached
    assert explained.first_difference == n_shared


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


def test_it_says_what_a_request_gets_from_the_host_tier(sensitive: Path) -> None:
    llm = LLM(sensitive, max_total_tokens=160, max_model_len=100, hicache_size=0.01, load_policy="always")
    greedy = SamplingParams(temperature=0, max_tokens=1)
    (first,) = llm.generate(TEXT, greedy)
    while llm.get_metrics().host.n_slots_free == llm.get_metrics().host.n_slots:
        llm.generate([5], TOKEN)  # the store ends beside the steps
    llm.generate([list(range(10 * n + 3, 10 * n + 83)) for n in range(4)], TOKEN)
    explained = llm.explain(TEXT)
    assert explained.is_loaded
    (again,) = llm.generate(TEXT, greedy)
    assert again.outputs == first.outputs
    assert (again.num_cached_tokens, again.num_loaded_tokens) == (explained.n_cached, explained.n_in_host)
    assert again.num_loaded_tokens > 0 == first.num_loaded_tokens
    other = llm.explain([*first.prompt_token_ids[:20], 7, *first.prompt_token_ids[21:]])
    assert (other.n_cached, other.reason, other.first_difference) == (20, "differs", 20)
    llm.flush_cache()
    assert llm.explain(TEXT).n_in_host == 0
    llm.shutdown()
