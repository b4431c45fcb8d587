"""What prefixes are remembered, and how long a prompt matches what was sent earlier."""

from __future__ import annotations

from itertools import pairwise

import pytest

from radixkv.frontend.replicas import recent_prefixes
from radixkv.frontend.replicas.recent_prefixes import RecentPrefixes, prefixes_of
from radixkv.wire.messages import pack_tokens

ALWAYS = {0: 0.0, 1: 0.0}


def prompt(*parts: int, n: int = 500) -> bytes:
    """Returns a prompt of runs of ``n`` tokens, each of which begins with its number."""
    return b"".join(pack_tokens([part, *range(100, 99 + n)]) for part in parts)


@pytest.mark.parametrize("n_tokens", [0, 15, 16, 17, 300, 5_000, 100_000])
def test_lengths_are_at_most_an_eighth_apart(n_tokens: int) -> None:
    lengths = [prefix.n_bytes // 4 for prefix in prefixes_of(bytes(4 * n_tokens), b"")]
    assert lengths == sorted(lengths)
    assert all(later - n <= max(16, n // 8) for n, later in pairwise([*lengths, n_tokens]))
    assert len(lengths) <= 140
    assert bool(lengths) == (n_tokens >= 16)


def test_a_prompt_matches_as_far_as_one_that_was_sent_begins_alike() -> None:
    recent = RecentPrefixes[int]()
    recent.add(prefixes_of(prompt(1, 2), b""), 0, 1.0)
    recent.add(prefixes_of(prompt(1, 3), b""), 1, 1.0)
    matched = recent.matched(prefixes_of(prompt(1, 2, 4), b""), ALWAYS)
    assert 4 * 1000 * 7 / 8 < matched[0] <= 4 * 1000
    assert 4 * 500 * 7 / 8 < matched[1] <= 4 * 500
    assert recent.matched(prefixes_of(prompt(5, 2), b""), ALWAYS) == {}


def test_another_namespace_matches_nothing() -> None:
    recent = RecentPrefixes[int]()
    recent.add(prefixes_of(prompt(1), b"a"), 0, 1.0)
    assert recent.matched(prefixes_of(prompt(1), b"b"), ALWAYS) == {}


def test_what_was_sent_before_a_time_does_not_count() -> None:
    recent = RecentPrefixes[int]()
    prefixes = prefixes_of(prompt(1), b"")
    recent.add(prefixes, 0, 1.0)
    recent.add(prefixes, 1, 3.0)
    assert recent.matched(prefixes, {0: 2.0, 1: 2.0}).keys() == {1}
    recent.add(prefixes, 0, 4.0)
    assert recent.matched(prefixes, {0: 2.0, 1: 2.0}).keys() == {0, 1}
    assert recent.matched(prefixes, {0: 2.0}).keys() == {0}, "another server does not count"


def test_what_was_sent_least_recently_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    recent = RecentPrefixes[int]()
    first, second = (prefixes_of(prompt(part), b"") for part in (1, 2))
    monkeypatch.setattr(recent_prefixes, "MAX_DIGESTS", 2 * len(first))
    recent.add(first, 0, 1.0)
    recent.add(second, 0, 2.0)
    recent.add(first, 0, 3.0)
    recent.add(prefixes_of(prompt(3), b""), 0, 4.0)
    assert recent.matched(first, ALWAYS) == {0: first[-1].n_bytes}
    assert recent.matched(second, ALWAYS) == {}
