"""Tokens that an infinite cache finds, and those that were anywhere in earlier prompts, against naive searches."""

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from radixkv.lab.bench.report.run_metrics import WINDOW, cache_report, optimum_cached_tokens, repeated_tokens
from support.cases import examples
from support.fake_openai import common
from support.report_records import record


def naive(requests):
    counts, seen = [], []
    for prompt, answers in requests:
        longest = max((common(prompt, other) for other in seen), default=0)
        counts.append(max(min(longest, len(prompt) - 1), 0))
        seen += [prompt + answer[:-1] for answer in answers or [[]]]
    return counts


ids = st.sampled_from([0, 1, 2, 255, 256, 257, 65536, 2**31 - 1])
answers = st.lists(st.lists(ids, max_size=3), max_size=3)
requests = st.lists(st.tuples(st.lists(ids, max_size=6), answers), max_size=12)


@examples(300)
@given(requests)
def test_the_optimum_equals_comparing_each_prompt_with_all_earlier_ones(requests):
    assert optimum_cached_tokens(requests) == naive(requests)


def test_a_repeated_prompt_still_computes_one_token():
    requests = [([1, 2, 3], [[9]]), ([1, 2, 3], [[9]]), ([1, 2, 3, 4], [[9]])]
    assert optimum_cached_tokens(requests) == [0, 2, 3]


def test_tokens_that_differ_in_one_byte_only_are_different():
    assert optimum_cached_tokens([([1, 256, 9], [[]]), ([1, 257, 9], [[]])]) == [0, 1]


def test_the_next_turn_hits_the_answer_except_its_last_token():
    turns = [([1, 2, 3], [[7, 8, 9]]), ([1, 2, 3, 7, 8, 9, 4], [[5]])]
    assert optimum_cached_tokens(turns) == [0, 5]


def test_every_choice_can_be_continued():
    first, second = [7, 8, 9], [6, 5, 9]
    requests = [
        ([1, 2], [first, second]),
        ([1, 2, 6, 5, 4], [[0]]),
        ([1, 2, 7, 8, 4], [[0]]),
        ([1, 2, 6, 8], [[0]]),
    ]
    assert optimum_cached_tokens(requests) == [0, 4, 4, 3]


def naive_repeats(prompts, n_cached):
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
repetitive = st.lists(
    st.lists(chunks | noise, min_size=1, max_size=5).map(lambda parts: [*chain.from_iterable(parts)]), max_size=5
)


@examples(100)
@given(repetitive)
def test_repeats_are_those_that_a_naive_search_finds(prompts):
    n_cached = optimum_cached_tokens([(prompt, ()) for prompt in prompts])
    assert repeated_tokens(prompts, n_cached) == naive_repeats(prompts, n_cached)


def test_the_same_chunks_in_another_order_are_repeated_but_not_cached():
    one, other = list(range(32)), list(range(50, 82))
    records = [record([1], [*one, *other]), record([1], [7, *other, *one, 8])]
    report = cache_report(records, counts_repeats=True)
    assert (report["optimum_pct"], report["repeated_pct"]) == (0.0, 100 * 64 / (64 + 66))
    assert "repeated_pct" not in cache_report(records)


def test_without_token_ids_repeats_are_not_known():
    assert cache_report([record([1], returns_ids=False)], counts_repeats=True)["repeated_pct"] is None
