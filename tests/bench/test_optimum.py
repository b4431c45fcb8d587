from fake_openai import common
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.bench.optimum import optimum_cached_tokens


def naive(prompts):
    total = 0
    for place, prompt in enumerate(prompts):
        longest = max((common(prompt, other) for other in prompts[:place]), default=0)
        total += max(min(longest, len(prompt) - 1), 0)
    return total


ids = st.sampled_from([0, 1, 2, 255, 256, 257, 65536, 2**31 - 1])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(ids, max_size=6), max_size=12))
def test_it_equals_comparing_each_prompt_with_all_before_it(prompts):
    assert optimum_cached_tokens(prompts) == naive(prompts)


def test_a_repeated_prompt_still_computes_one_token():
    assert optimum_cached_tokens([[1, 2, 3], [1, 2, 3], [1, 2, 3, 4]]) == 2 + 3


def test_tokens_that_differ_in_one_byte_only_are_different():
    assert optimum_cached_tokens([[1, 256, 9], [1, 257, 9]]) == 1
