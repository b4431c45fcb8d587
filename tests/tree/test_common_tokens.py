"""How many leading tokens two sequences have in common, short and long."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.tree.neighbours import n_common_tokens
from support.cases import examples
from support.engine import token_bytes


@pytest.mark.parametrize("n_tokens", [1, 127, 128, 129, 1000, 5001])
@given(place=st.integers(0, 1 << 13), n_less=st.integers(0, 300), seed=st.integers(0, 9))
@examples(60)
def test_the_first_token_that_differs_ends_what_is_common(
    n_tokens: int, place: int, n_less: int, seed: int
) -> None:
    first = Random(seed).choices(range(1 << 20), k=n_tokens)
    place %= n_tokens
    second = [*first[:place], first[place] ^ (1 << seed), *first[place + 1 :]][: n_tokens - n_less]
    n_common = min(place, len(second))
    assert n_common_tokens(token_bytes(first), token_bytes(second)) == n_common
    assert n_common_tokens(token_bytes(second), token_bytes(first)) == n_common


@pytest.mark.parametrize("n_tokens", [0, 1, 128, 129, 5001])
def test_a_beginning_of_a_sequence_is_common_as_a_whole(n_tokens: int) -> None:
    tokens = token_bytes(range(n_tokens + 3))
    assert n_common_tokens(tokens, tokens[: 4 * n_tokens]) == n_tokens
    assert n_common_tokens(tokens, tokens) == n_tokens + 3
