"""Lengths of answers that have ended, against a list that is searched from end to end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from radixkv.runtime.headroom.answer_lengths import MAX_KEYS, MAX_LENGTHS, MIN_LENGTHS, AnswerLengths, LastLengths
from support.cases import examples


@examples(60)
@given(
    lengths=st.lists(st.integers(1, 40), max_size=2 * MAX_LENGTHS),
    share=st.floats(0, 1, exclude_max=True),
    length=st.integers(0, 41),
)
def test_a_quantile_is_that_of_the_longer_ones_of_the_last_answers(
    lengths: list[int], share: float, length: int
) -> None:
    last = LastLengths()
    for one in lengths:
        last.add(one)
    known = sorted(lengths[-MAX_LENGTHS:])
    longer = [one for one in known if one > length]
    expected = longer[int(share * len(longer))] if longer and len(known) >= MIN_LENGTHS else None
    assert last.quantile(share, length) == expected


def test_the_first_key_that_knows_longer_answers_decides() -> None:
    lengths = AnswerLengths()
    for _ in range(MIN_LENGTHS):
        lengths.add(["session", "tenant"], 10)
        lengths.add(["tenant"], 99)
    assert lengths.quantile(["session", "tenant"], 0.0, 0) == 10
    assert lengths.quantile(["session", "tenant"], 0.0, 10) == 99
    assert lengths.quantile(["other", "tenant"], 0.9, 0) == 99
    assert lengths.quantile(["other"], 0.0, 0) is None


def test_the_key_that_was_used_least_recently_is_forgotten() -> None:
    lengths = AnswerLengths()
    for _ in range(MIN_LENGTHS):
        lengths.add([0, 1], 5)
    for key in range(2, MAX_KEYS + 1):
        lengths.add([1], 5)
        lengths.add([key], 5)
    assert lengths.quantile([0], 0.0, 0) is None
    assert lengths.quantile([1], 0.0, 0) == 5
