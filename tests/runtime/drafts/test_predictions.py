"""Guesses from a request's prediction, against a search at all of its places."""

from __future__ import annotations

from time import perf_counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.errors import InvalidRequest
from radixkv.runtime.drafts.predictions import Predictions
from radixkv.runtime.request import Request
from radixkv.tree.node import Namespace
from radixkv.wire.messages import Submit
from radixkv.wire.sampling import SamplingParams
from support.engine import token_bytes
from support.fake_device import unpack

SIZES = (3, 8)
VOCAB_SIZE = 1000
texts = st.lists(st.integers(0, 2), max_size=24)


def request(prediction: list[int], answer: list[int], prompt: tuple[int, ...] = (7, 8)) -> Request:
    found = Request("a", Namespace(), bytearray(token_bytes([*prompt, *answer])), len(prompt), 99)
    if prediction:
        message = Submit("a", token_bytes([7]), SamplingParams(), prediction=token_bytes(prediction))
        found.observers = (Predictions(SIZES, VOCAB_SIZE).follow(message, [found]),)
    return found


def guessed(prediction: list[int], answer: list[int], n_tokens: int = 4) -> tuple[int, list[int]] | None:
    found = Predictions(SIZES, VOCAB_SIZE).guess(request(prediction, answer), n_tokens)
    if found is None:
        return None
    assert found.source == "prediction"
    return found.n_matched, unpack(found.tokens)


def expected(prediction: list[int], answer: list[int], n_tokens: int) -> tuple[int, list[int]] | None:
    if len(answer) < SIZES[0]:
        begins = answer and prediction[: len(answer)] == answer and len(prediction) > len(answer)
        return (len(answer), prediction[len(answer) :][:n_tokens]) if begins else None
    for size in range(min(len(answer), SIZES[1]), SIZES[0] - 1, -1):
        ends = [end for end in range(size, len(prediction)) if prediction[end - size : end] == answer[-size:]]
        if ends:
            end = min(ends, key=lambda one: abs(one - len(answer)))
            return size, prediction[end : end + n_tokens]
    return None


@given(prediction=texts, answer=texts, n_tokens=st.integers(1, 9))
def test_it_is_what_follows_the_longest_match_that_is_nearest(
    prediction: list[int], answer: list[int], n_tokens: int
) -> None:
    assert guessed(prediction, answer, n_tokens) == expected(prediction, answer, n_tokens)


def test_an_edited_answer_stays_in_step_with_its_prediction() -> None:
    line = [1, 2, 3, 4, 5, 6, 7, 8]
    prediction = [token for n in range(9) for token in (*line, 100 + n)]
    assert guessed(prediction, [*prediction[:39], 50, 51, *prediction[39:44]], 1) == (5, [104])
    assert guessed(prediction, prediction[20:28]) == (8, prediction[28:32]), "the beginning is left out"


def test_the_prompt_matches_no_prediction_and_the_end_has_no_guess() -> None:
    assert guessed([7, 8, 1, 2], []) is None
    assert guessed([1, 2, 3, 4], [1, 2, 3, 4]) is None
    assert guessed([], [1, 2, 3, 4]) is None


@pytest.mark.parametrize("prediction", [b"abc", token_bytes([1, -1]), token_bytes([VOCAB_SIZE])])
def test_what_is_no_token_is_refused(prediction: bytes) -> None:
    message = Submit("a", token_bytes([7]), SamplingParams(), prediction=prediction)
    with pytest.raises(InvalidRequest) as refused:
        Predictions(SIZES, VOCAB_SIZE).follow(message, [])
    assert refused.value.param == "prediction"


def test_a_long_prediction_that_repeats_itself_is_fast() -> None:
    following = request([1] * (1 << 17), [1] * 1000)
    source = Predictions(SIZES, VOCAB_SIZE)
    times = []
    for _ in range(20):
        begun = perf_counter()
        assert source.guess(following, 8) is not None
        times.append(perf_counter() - begun)
    assert min(times) < 2e-3
