"""The tokens that were in earlier prompts at any position, against a naive search."""

from __future__ import annotations

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from radixkv.lab.bench.report.run_metrics import WINDOW, cache_report, optimum_cached_tokens, repeated_tokens
from support.cases import examples
from support.report_records import record


def naive(prompts: list[list[int]], n_cached: list[int]) -> list[int]:
    counts = []
    for index, prompt in enumerate(prompts):
        found = set(range(n_cached[index]))
        for start in range(len(prompt) - WINDOW + 1):
            run = prompt[start : start + WINDOW]
            for earlier in prompts[:index]:
                if any(earlier[at : at + WINDOW] == run for at in range(len(earlier))):
                    found |= {*range(start, start + WINDOW)}
        counts.append(min(len(found), len(prompt) - 1))
    return counts


chunks = st.integers(0, 3).map(lambda chunk: [100 * chunk + n for n in range(20)])
noise = st.lists(st.integers(0, 2), min_size=1, max_size=20)
prompts = st.lists(
    st.lists(chunks | noise, min_size=1, max_size=5).map(lambda parts: [*chain.from_iterable(parts)]), max_size=5
)


@examples(100)
@given(prompts)
def test_repeats_are_those_that_a_naive_search_finds(prompts: list[list[int]]) -> None:
    n_cached = optimum_cached_tokens([(prompt, ()) for prompt in prompts])
    assert repeated_tokens(prompts, n_cached) == naive(prompts, n_cached)


def test_the_same_chunks_in_another_order_are_repeated_but_not_cached() -> None:
    one, other = list(range(32)), list(range(50, 82))
    records = [record([1], [*one, *other]), record([1], [7, *other, *one, 8])]
    report = cache_report(records, counts_repeats=True)
    assert (report["optimum_pct"], report["repeated_pct"]) == (0.0, 100 * 64 / (64 + 66))
    assert "repeated_pct" not in cache_report(records)


def test_without_token_ids_repeats_are_not_known() -> None:
    assert cache_report([record([1], returns_ids=False)], counts_repeats=True)["repeated_pct"] is None
