"""Guesses from recent answers, against a search in all answers that were given."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.runtime.cache.block_table import ComputedRow
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.drafts.recent_answers import RecentAnswers
from radixkv.runtime.drafts.sources import Guess
from radixkv.runtime.request import Recovery, Request
from radixkv.tree.node import Namespace
from radixkv.wire.messages import Submit
from radixkv.wire.namespace import CacheNamespace
from radixkv.wire.sampling import SamplingParams
from support.engine import token_bytes
from support.fake_device import unpack
from support.trees import ids

SIZES = (2, 3, 5)
OURS, THEIRS = Namespace(), Namespace(salt="theirs")
texts = st.lists(st.sampled_from((0, 1, 255, 256, (1 << 31) - 1)), max_size=24)


PAGE_SIZE = 128
"""The answers of most tests fill no page, so that the cache need not have them."""


def cached(*namespaces: Namespace) -> PageCache:
    """Returns a cache with a page of each namespace: without one, its answers are not remembered."""
    cache = PageCache(len(namespaces) + 2, PAGE_SIZE)
    for namespace in namespaces:
        serve(cache, request([1] * (PAGE_SIZE + 1), namespace=namespace))
    return cache


def serve(cache: PageCache, served: Request, *, flushes: bool = False) -> None:
    """Computes a request, and ends it; before the end it may flush the cache."""
    n_tokens = served.n_known - 1
    blocks = cache.open(served.namespace, bytes(served.known_key[: n_tokens * 4]))
    assert cache.reserve(blocks, cache.pages_for(n_tokens))
    cache.commit_computed([ComputedRow(blocks, served.known_key, n_tokens, 0)], 0)
    if flushes:
        cache.flush()
    cache.close(blocks)


def request(text: list[int], *, n_prompt: int = 0, namespace: Namespace = OURS, **fields: object) -> Request:
    return Request("a", namespace, bytearray(token_bytes(text)), n_prompt, 99, **fields)  # type: ignore[arg-type]


def expected(answers: list[list[int]], text: list[int], size: int, n_tokens: int) -> list[int]:
    """Returns what followed the last ``size`` tokens when they came last; [] if nothing ever did."""
    for answer in reversed(answers):
        for end in range(len(answer) - 1, size - 1, -1):
            if answer[end - size : end] == text[-size:]:
                return answer[end : end + n_tokens]
    return []


@given(answers=st.lists(texts, max_size=8), text=texts, n_tokens=st.integers(1, 9), n_prompt=st.integers(0, 3))
def test_it_is_what_followed_in_the_newest_answer(
    answers: list[list[int]], text: list[int], n_tokens: int, n_prompt: int
) -> None:
    source = RecentAnswers(cached(OURS), SIZES)
    for answer in answers:
        source.released(request([7] * n_prompt + answer, n_prompt=n_prompt))
    found = source.guess(request(text), n_tokens)
    if found is None:
        return
    assert found.source == "answers"
    assert found.n_matched in SIZES
    assert len(text) >= found.n_matched
    assert unpack(found.tokens) == expected(answers, text, found.n_matched, n_tokens)


def answers_at_random(random: Random, n_answers: int, n_tokens: int = 40) -> list[list[int]]:
    return [[random.randrange(1 << 17) for _ in range(n_tokens)] for _ in range(n_answers)]


def n_found(source: RecentAnswers, answers: list[list[int]], namespace: Namespace = OURS) -> int:
    """Returns in how many of the answers the end of their first 20 tokens is found, as the longest match."""
    guesses = [source.guess(request([9, *one[:20]], n_prompt=1, namespace=namespace), 7) for one in answers]
    right = [Guess("answers", 5, token_bytes(one[20:27])) for one in answers]
    return sum(found == wanted for found, wanted in zip(guesses, right, strict=True))


def test_nearly_all_of_many_answers_are_found_while_the_memory_grows() -> None:
    source, answers = RecentAnswers(cached(OURS), SIZES), answers_at_random(Random(0), 1000)
    for answer in answers:
        source.released(request([1, *answer], n_prompt=1))
    assert n_found(source, answers) > 800
    assert n_found(source, answers[-100:]) > 95


def test_the_oldest_answers_go_when_there_is_no_room() -> None:
    source = RecentAnswers(cached(OURS), SIZES, max_namespace_tokens=1000)
    answers = answers_at_random(Random(0), 200)
    for answer in answers:
        source.released(request(answer))
        assert source.n_tokens <= 1000
    assert n_found(source, answers[-20:]) > 13
    assert n_found(source, answers[:150]) == 0


def test_the_end_of_an_answer_that_is_too_long_is_remembered() -> None:
    source = RecentAnswers(cached(OURS), SIZES, max_namespace_tokens=30)
    (answer,) = answers_at_random(Random(0), 1, 100)
    source.released(request(answer))
    assert source.guess(request(answer[:60]), 7) is None
    assert source.guess(request(answer[:90]), 99) == Guess("answers", 5, token_bytes(answer[90:]))


def test_no_guess_crosses_namespaces_nor_answers() -> None:
    source = RecentAnswers(cached(OURS, THEIRS), SIZES)
    source.released(request([1, 2, 3, 4], namespace=THEIRS))
    assert source.guess(request([1, 2]), 9) is None
    source.released(request([5, 6, 1, 2]))
    source.released(request([1, 2]))
    source.released(request([8, 9]))
    assert source.guess(request([1, 2]), 9) is None
    assert source.guess(request([5, 6]), 9) == Guess("answers", 2, token_bytes([1, 2]))
    source.released(request([1, 2, 7]))
    source.released(request([1, 2]))
    assert source.guess(request([1, 2]), 9) == Guess("answers", 2, token_bytes([7]))
    assert source.guess(request([1, 2], namespace=THEIRS), 9) == Guess("answers", 2, token_bytes([3, 4]))


def test_the_namespace_without_new_answers_is_forgotten_first() -> None:
    namespaces = [Namespace(salt=str(n)) for n in range(40)]
    source = RecentAnswers(cached(*namespaces), SIZES, max_namespace_tokens=1 << 12, max_tokens=10 << 12)
    answers = answers_at_random(Random(0), 40)
    for namespace, answer in zip(namespaces, answers, strict=True):
        source.released(request(answer, namespace=namespace))
        source.released(request([1, 2, 3], namespace=namespaces[0]))
        assert source.n_tokens <= 10 << 12
    known = [n for n in range(40) if n_found(source, [answers[n]], namespaces[n])]
    assert known == [0, *range(31, 40)]


def test_a_namespace_whose_pages_are_dropped_is_forgotten() -> None:
    cache = cached(OURS, THEIRS)
    source, (answer,) = RecentAnswers(cache, SIZES), answers_at_random(Random(0), 1)
    for namespace in (OURS, THEIRS):
        source.released(request(answer, namespace=namespace))
    cache.invalidate(OURS, b"")
    assert (n_found(source, [answer]), n_found(source, [answer], THEIRS)) == (0, 1)
    source.released(request([3, 4, 5]))
    assert source.guess(request([3, 4]), 1) is None, "nothing of the namespace is cached"
    serve(cache, request([1] * (PAGE_SIZE + 1)))
    assert n_found(source, [answer]) == 0
    source.released(request([3, 4, 5]))
    assert source.guess(request([3, 4]), 1) == Guess("answers", 2, token_bytes([5]))
    assert n_found(source, [answer]) == 0


def test_an_answer_that_the_cache_does_not_have_is_not_remembered() -> None:
    cache = PageCache(40, 4)
    source, (first, second) = RecentAnswers(cache, SIZES), answers_at_random(Random(0), 2)
    for answer, flushes in ((first, False), (second, True)):
        answered = request([1, *answer], n_prompt=1)
        serve(cache, answered, flushes=flushes)
        serve(cache, request([2] * 9))  # the namespace has a page in any case
        source.released(answered)
        assert n_found(source, [answer]) == (not flushes)


def test_requests_that_are_computed_apart_give_nothing() -> None:
    source, (answer,) = RecentAnswers(cached(OURS), SIZES), answers_at_random(Random(0), 1)
    source.released(request(answer, recovery=Recovery(bypasses_tree=True)))
    assert n_found(source, [answer]) == 0
    source.released(request(answer))
    assert n_found(source, [answer]) == 1


@pytest.mark.parametrize(
    ("fields", "sampling", "is_followed"),
    [
        ({}, {}, True),
        ({"namespace": CacheNamespace(cache_salt="x")}, {"n": 3}, True),
        ({"reads_cache": False}, {}, False),
        ({"is_canary": True}, {}, False),
        ({}, {"prompt_logprobs": 1}, False),
        ({}, {"use_beam_search": True, "n": 2}, False),
    ],
)
def test_which_requests_are_followed(
    fields: dict[str, object], sampling: dict[str, object], is_followed: bool
) -> None:
    source = RecentAnswers(PageCache(1, 1), SIZES)
    message = Submit("a", ids(1), SamplingParams(**sampling), **fields)  # type: ignore[arg-type]
    assert (source.follow(message, []) is source) == is_followed
