from fake_openai import common
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.bench.optimum import optimum_cached_tokens


def naive(requests):
    total, seen = 0, []
    for prompt, answer in requests:
        longest = max((common(prompt, other) for other in seen), default=0)
        total += max(min(longest, len(prompt) - 1), 0)
        seen.append(prompt + answer[:-1])
    return total


ids = st.sampled_from([0, 1, 2, 255, 256, 257, 65536, 2**31 - 1])
requests = st.lists(st.tuples(st.lists(ids, max_size=6), st.lists(ids, max_size=3)), max_size=12)


@settings(max_examples=300, deadline=None)
@given(requests)
def test_it_equals_comparing_each_prompt_with_all_before_it(requests):
    assert optimum_cached_tokens(requests) == naive(requests)


def test_a_repeated_prompt_still_computes_one_token():
    assert optimum_cached_tokens([([1, 2, 3], [9]), ([1, 2, 3], [9]), ([1, 2, 3, 4], [9])]) == 2 + 3


def test_tokens_that_differ_in_one_byte_only_are_different():
    assert optimum_cached_tokens([([1, 256, 9], []), ([1, 257, 9], [])]) == 1


def test_the_next_turn_finds_the_answer_but_for_its_last_token():
    turns = [([1, 2, 3], [7, 8, 9]), ([1, 2, 3, 7, 8, 9, 4], [5])]
    assert optimum_cached_tokens(turns) == 5
