"""Tests of stop strings: they are found however the text is split, and no part of them is returned."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from radixkv.generation.stop import StopStrings
from support.cases import examples

FEW_CHARACTERS = st.text("abé🎉", max_size=40)
STOPS = st.lists(st.text("abé🎉", min_size=1, max_size=6), max_size=4)


def expected(text: str, stop: list[str]) -> tuple[str, str | None]:
    """Finds the first end of any stop string, and the longest stop string that ends there, as the oracle."""
    for end in range(len(text) + 1):
        matched = [word for word in stop if text[:end].endswith(word)]
        if matched:
            longest = max(matched, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(text: str, stop: list[str], cuts: list[int]) -> tuple[str, str | None]:
    strings = StopStrings(stop)
    pieces = []
    at = 0
    for cut in [*cuts, *[1] * len(text)]:
        piece, matched = strings.push(text[at : at + cut])
        pieces.append(piece)
        assert matched == (strings.matched is not None)
        at += cut
    pieces.append(strings.finish())
    return "".join(pieces), strings.matched


@examples(500)
@given(text=FEW_CHARACTERS, stop=STOPS, cuts=st.lists(st.integers(0, 7), max_size=10))
@example(text="abab", stop=[], cuts=[])
@example(text="é🎉a", stop=["abc", "ab"], cuts=[2])
@example(text="aabébé", stop=["bé"], cuts=[3])
@example(text="xabab", stop=["abab"], cuts=[3])
@example(text="aab", stop=["ab"], cuts=[1])
@example(text="ab", stop=["abc", "b"], cuts=[1])
@example(text="abc", stop=["bc", "abc"], cuts=[2])
def test_shown_text_is_that_before_the_first_stop_string(text: str, stop: list[str], cuts: list[int]) -> None:
    assert run(text, stop, cuts) == expected(text, stop)


@examples(300)
@given(text=FEW_CHARACTERS, stop=STOPS)
def test_only_possible_starts_of_a_stop_string_are_held_back(text: str, stop: list[str]) -> None:
    strings = StopStrings(stop)
    shown = ""
    for index, character in enumerate(text, start=1):
        piece, matched = strings.push(character)
        if matched:
            return
        shown += piece
        pending = text[len(shown) : index]
        assert text.startswith(shown)
        assert not pending or any(word.startswith(pending) and word != pending for word in stop)
