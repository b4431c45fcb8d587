"""Continuations of a text by what it said before, against a search token by token."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from radixkv.runtime.drafts.own_text import Continuation, continue_text
from support.engine import token_bytes
from support.fake_device import unpack

SIZES = (2, 3, 5)
tokens = st.lists(st.sampled_from((0, 1, 2, 256, 1 << 16)), max_size=34)
"""Ids whose bytes look alike when they are not read from the start of one; few enough to look at all places."""


def expected(text: list[int], n_tokens: int) -> Continuation | None:
    found = None
    for size in SIZES:
        places = [end for end in range(size, len(text)) if text[end - size : end] == text[-size:]]
        if len(text) < size or not places:
            break
        followers = text[places[-1] :]
        continued = [followers[n % len(followers)] for n in range(n_tokens)]
        found = Continuation(size, token_bytes(continued))
    return found


@given(text=tokens, n_tokens=st.integers(1, 12))
@example(text=[0, 0, 0, 0], n_tokens=3)
@example(text=[256, 0, 1, 256, 0], n_tokens=3)
def test_it_is_what_followed_the_last_place(text: list[int], n_tokens: int) -> None:
    assert continue_text(bytearray(token_bytes(text)), SIZES, n_tokens) == expected(text, n_tokens)


def test_a_text_that_repeats_itself_is_continued_round_after_round() -> None:
    found = continue_text(bytearray(token_bytes([9, 1, 2, 1, 2, 1, 2])), SIZES, 5)
    assert found is not None
    assert unpack(found.tokens) == [1, 2, 1, 2, 1]


def test_a_text_that_was_made_to_be_slow_is_continued_from_one_of_its_newest_places() -> None:
    text = [7, 8, 9, 5, 8, 9, *[1, 8, 9] * 2000, 5, 8, 9]
    found = continue_text(bytearray(token_bytes(text)), SIZES, 2)
    assert found == Continuation(2, token_bytes([5, 8]))
    found = continue_text(bytearray(token_bytes([*text, 1, 8, 9])), SIZES, 2)
    assert found == Continuation(5, token_bytes([5, 8]))
