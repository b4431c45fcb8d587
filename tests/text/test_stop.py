"""Stop strings are found wherever the text is cut, and nothing of them is shown."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from radixkv.text.stop import StopStrings

FEW_CHARACTERS = st.text("abé🎉", max_size=40)
STOPS = st.lists(st.text("abé🎉", min_size=1, max_size=6), max_size=4)


def expected(text: str, stop: list[str]) -> tuple[str, str | None]:
    """The oracle: the first end at which any stop string ends; of those that end there the longest."""
    for end in range(len(text) + 1):
        met = [word for word in stop if text[:end].endswith(word)]
        if met:
            longest = max(met, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(text: str, stop: list[str], cuts: list[int]) -> tuple[str, str | None, list[str]]:
    strings = StopStrings(stop)
    pieces = []
    at = 0
    for cut in [*cuts, *[1] * len(text)]:
        piece, met = strings.push(text[at : at + cut])
        pieces.append(piece)
        assert met == (strings.met is not None)
        at += cut
    pieces.append(strings.finish())
    return "".join(pieces), strings.met, pieces


@settings(max_examples=500, deadline=None)
@given(text=FEW_CHARACTERS, stop=STOPS, cuts=st.lists(st.integers(0, 7), max_size=10))
@example(text="xabab", stop=["abab"], cuts=[3])
@example(text="aab", stop=["ab"], cuts=[1])
@example(text="ab", stop=["abc", "b"], cuts=[1])
@example(text="abc", stop=["bc", "abc"], cuts=[2])
def test_shown_text_is_that_before_the_first_stop_string(text: str, stop: list[str], cuts: list[int]) -> None:
    shown, met, _ = run(text, stop, cuts)
    assert (shown, met) == expected(text, stop)


@settings(max_examples=300, deadline=None)
@given(text=FEW_CHARACTERS, stop=STOPS)
def test_no_more_is_held_back_than_could_begin_a_stop_string(text: str, stop: list[str]) -> None:
    strings = StopStrings(stop)
    shown = ""
    for index, character in enumerate(text, start=1):
        piece, met = strings.push(character)
        if met:
            return
        shown += piece
        held = text[len(shown) : index]
        assert text.startswith(shown)
        assert not held or any(word.startswith(held) and word != held for word in stop)


def test_after_the_stop_string_everything_is_dropped() -> None:
    strings = StopStrings(["END"])
    assert strings.push("one E") == ("one ", False)
    assert strings.push("ND two END") == ("", True)
    assert strings.push("three") == ("", True)
    assert strings.finish() == ""


def test_beginning_of_a_stop_string_is_shown_when_no_more_comes() -> None:
    strings = StopStrings(["\n\nQuestion:"])
    assert strings.push("42\n\nQuest") == ("42", False)
    assert strings.finish() == "\n\nQuest"


def test_no_stop_strings() -> None:
    strings = StopStrings([])
    assert strings.push("text") == ("text", False)
    assert strings.finish() == ""
