"""What acceptance is learned from guesses."""

from __future__ import annotations

from random import Random

import pytest

from radixkv.runtime.drafts.acceptance import Acceptance


@pytest.mark.parametrize(("first", "later"), [(0.9, 0.95), (0.3, 0.9), (0.05, 0.2), (1.0, 1.0)])
def test_chances_are_those_of_the_guesses(first: float, later: float) -> None:
    rng = Random(1)
    acceptance = Acceptance()
    totals = [0.0] * 3
    for n in range(2200):
        n_right = 0
        while n_right < 4 and rng.random() < (later if n_right else first):
            n_right += 1
        acceptance.learn("kind", n_right, min(4, n_right + 1))
        if n >= 200:
            totals = [total + chance for total, chance in zip(totals, acceptance.chances("kind", 3), strict=True)]
    expected = [first, first * later, first * later**2]
    assert [total / 2000 for total in totals] == pytest.approx(expected, abs=0.06)


def test_kinds_are_apart() -> None:
    acceptance = Acceptance()
    for _ in range(50):
        acceptance.learn("good", 3, 3)
        acceptance.learn("bad", 0, 1)
    assert acceptance.chances("good", 3)[2] > 0.9
    assert acceptance.chances("bad", 1)[0] < 0.1
    assert acceptance.chances("new", 2) == pytest.approx([0.5, 0.4])


def test_a_kind_may_be_trusted_before_it_is_known() -> None:
    acceptance = Acceptance()
    assert acceptance.chances("trusted", 2, (0.98, 0.95)) == pytest.approx([0.98, 0.98 * 0.95])
    for _ in range(50):
        acceptance.learn("trusted", 0, 1)
    assert acceptance.chances("trusted", 1, (0.98, 0.95))[0] < 0.1


def test_a_change_is_learned_within_a_hundred_guesses() -> None:
    acceptance = Acceptance()
    for _ in range(1000):
        acceptance.learn("kind", 0, 1)
    for _ in range(100):
        acceptance.learn("kind", 4, 4)
    assert acceptance.chances("kind", 4)[3] > 0.8
