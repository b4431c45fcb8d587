from hypothesis import given
from hypothesis import strategies as st

from radixkv.lab.bench.report.run_metrics import optimum_cached_tokens
from support.cases import examples
from support.fake_openai import common


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
