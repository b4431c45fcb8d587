"""Tests of ``LLM.pin_cache``: what it keeps in the cache, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from radixkv.errors import InvalidRequest, UnsupportedFeature
from radixkv.llm import LLM
from radixkv.wire.sampling import SamplingParams

TOKEN = SamplingParams(max_tokens=1)
PROMPT = list(range(3, 67))
OTHERS = [list(range(first, first + 200)) for first in (100, 101, 102)]


def test_a_pinned_prompt_outlives_others(sensitive: Path) -> None:
    llm = LLM(sensitive, max_total_tokens=512, max_model_len=256)
    llm.generate([PROMPT], TOKEN, use_tqdm=False)
    pinned = llm.pin_cache(PROMPT, ttl_s=600)
    assert (pinned.n_tokens, pinned.n_pinned) == (64, 64)
    assert 590 < pinned.seconds_left <= 600
    assert llm.get_metrics().n_pages_pinned == 4
    llm.generate(OTHERS, TOKEN, use_tqdm=False)
    explained = llm.explain(PROMPT)
    assert (explained.n_cached, explained.n_pinned) == (63, 64)

    assert llm.pin_cache(PROMPT, ttl_s=0).n_pinned == 0
    llm.generate(OTHERS, TOKEN, use_tqdm=False)
    assert llm.explain(PROMPT).n_cached == 0
    llm.shutdown()


def test_a_pin_covers_the_host_tier_too(sensitive: Path) -> None:
    with LLM(sensitive, max_total_tokens=512, max_model_len=256, host_memory_bytes=8 << 20) as llm:

        def n_pinned() -> tuple[int, int]:
            llm.generate([OTHERS[0]], TOKEN, use_tqdm=False)  # takes turns, in which copies end
            stats = llm.get_metrics()
            assert stats.host is not None
            return stats.n_pages_pinned, stats.host.n_slots_pinned

        llm.generate([PROMPT], TOKEN, use_tqdm=False)
        llm.pin_cache(PROMPT, ttl_s=600)
        assert any(n_pinned() == (4, 4) for _ in range(200)), "the host tier has no pinned pages"
        llm.pin_cache(PROMPT, ttl_s=0)
        assert n_pinned() == (0, 0)


def test_the_budget_bounds_a_pin_and_0_refuses_it(sensitive: Path) -> None:
    llm = LLM(sensitive, max_total_tokens=512, max_model_len=256, pin_budget=0.125)
    llm.generate([PROMPT], TOKEN, use_tqdm=False)
    assert llm.pin_cache(PROMPT).n_pinned == 64
    llm.generate([OTHERS[0]], TOKEN, use_tqdm=False)
    assert llm.pin_cache(OTHERS[0]).n_pinned == 64
    assert llm.explain(PROMPT).n_pinned == 0, "it was pinned before and gave way"
    llm.shutdown()

    for settings, name in (({"pin_budget": 0}, "--pin-budget"), ({"enable_prefix_caching": False}, "prefix")):
        llm = LLM(sensitive, max_total_tokens=512, max_model_len=256, **settings)
        with llm, pytest.raises(UnsupportedFeature, match=name):
            llm.pin_cache(PROMPT)


@pytest.mark.parametrize("ttl_s", [-1, 86401, float("inf"), float("nan"), "5m", True])
def test_a_wrong_time_to_live_is_refused(llm: LLM, ttl_s: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.pin_cache(PROMPT, ttl_s=ttl_s)
    assert caught.value.param == "ttl"
