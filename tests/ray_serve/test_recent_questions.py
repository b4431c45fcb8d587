"""What a router remembers of the requests that it has just sent."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from radixkv.ray_serve.recent_questions import RecentQuestions


@given(st.integers(0, 9000), st.binary(max_size=3), st.binary(max_size=3))
def test_the_share_is_that_of_equal_bytes_at_the_beginning(n_equal, one, other):
    recent, head = RecentQuestions(), bytes(n_equal)
    first, second = head + one, head + other + b"."
    recent.add("a", first, 0.0)
    pairs = enumerate(zip(first, second, strict=False))
    n = next((index for index, (x, y) in pairs if x != y), min(len(first), len(second)))
    assert recent.shares(second, 1.0) == {"a": n / len(second)}


def test_each_server_has_the_best_of_its_questions_and_old_ones_are_forgotten():
    recent = RecentQuestions()
    recent.add("a", b"abcd", 0.0)
    recent.add("b", b"ab", 5.0)
    recent.add("b", b"x", 6.0)
    assert recent.shares(b"abcd", 10.0) == {"a": 1.0, "b": 0.5}
    assert recent.shares(b"abcd", 11.0) == {"b": 0.5}
