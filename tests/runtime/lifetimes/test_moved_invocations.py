"""What sessions and pauses make of a turn in which the invocation of an activated LoRA has moved."""

from __future__ import annotations

import pytest

from radixkv.wire.adapter_messages import ServedAdapter
from support.fake_adapters import fake_adapters
from support.loop_frontend import Frontend, done

JUDGE, INVOCATION = "12ab", (90, 91)
HISTORY = list(range(1, 25))
FIRST = [*HISTORY, *INVOCATION, 60, 61]


@pytest.fixture
def front() -> Frontend:
    return Frontend(n_pages=32, adapters=fake_adapters(ServedAdapter("judge", "judge", JUDGE, INVOCATION)))


def serve(front: Frontend, name: str, prompt: list[int], **options: object) -> tuple[list[int], int]:
    """Returns prompt and answer, and how many tokens of the prompt were found."""
    received = front.serve(name, prompt, temperature=0.0, ignore_eos=True, **options)
    return [*prompt, *received.tokens[0]], done(received).cache_use.n_cached


def press(front: Frontend, n_prompts: int, n_tokens: int = 36) -> None:
    """Serves prompts of nobody who comes back."""
    for number in range(n_prompts):
        front.now += 0.01
        begin = 40 * number + 200
        serve(front, f"pressure {number}", list(range(begin, begin + n_tokens)))


def n_cached(front: Frontend, tokens: list[int], adapter: str = "") -> int:
    return front.explain(tokens, adapter=adapter).n_cached


def test_a_session_keeps_what_is_before_the_first_invocation(front: Frontend) -> None:
    """The later turn is the model's there; what the adapter has computed behind it nobody will go on from."""
    first, _ = serve(front, "first", FIRST, adapter=JUDGE, session_id="chat")
    second, n_found = serve(front, "second", [*first, 62, *INVOCATION], adapter=JUDGE, session_id="chat")
    assert n_found == len(HISTORY)
    n_first = n_cached(front, first, JUDGE)
    press(front, 2)
    assert n_first > len(HISTORY)
    assert n_cached(front, first, JUDGE) < n_first, "its pages went first"
    assert n_cached(front, second, JUDGE) >= len(second) // 4 * 4 - 4
    _, n_found = serve(front, "third", [*second, 63, *INVOCATION], adapter=JUDGE, session_id="chat")
    assert n_found >= (len(first) + 1) // 4 * 4, "the pages before the second invocation"


def test_a_session_of_the_model_keeps_all_that_an_adapter_only_looked_at(front: Frontend) -> None:
    first, _ = serve(front, "first", HISTORY, session_id="chat")
    serve(front, "judged", [*first, *INVOCATION, 60], adapter=JUDGE, session_id="chat")
    second, n_found = serve(front, "second", [*first, 61, 62, 63], session_id="chat")
    assert n_found >= len(first) - 1
    press(front, 2)
    assert n_cached(front, second) >= len(second) // 4 * 4 - 4


@pytest.mark.parametrize("is_pressed", [False, True])
def test_a_return_is_on_the_device_if_that_has_what_it_can_use(front: Frontend, is_pressed: bool) -> None:
    """Here: what is before the first invocation, and nothing behind it."""
    first, _ = serve(front, "first", FIRST, adapter=JUDGE, may_pause=True)
    front.begin_pause("first")
    if is_pressed:
        press(front, 6)
    _, n_found = serve(front, "second", [*first, 62, *INVOCATION], adapter=JUDGE, resumes="first")
    assert n_found == (0 if is_pressed else len(HISTORY))
    pauses = front.stats().pauses
    assert pauses is not None
    assert (pauses.returns_total, pauses.returns_on_device_total) == (1, 0 if is_pressed else 1)


def test_a_return_counts_though_the_adapters_part_was_evicted(front: Frontend) -> None:
    """The return cannot use that: as before, what it can use was there."""
    first, _ = serve(front, "first", FIRST, adapter=JUDGE, may_pause=True)
    front.begin_pause("first")
    serve(front, "history", [*HISTORY, 70])  # a later use of the common pages
    press(front, 12, n_tokens=4)
    assert n_cached(front, FIRST, JUDGE) == len(HISTORY)
    serve(front, "second", [*first, 62, *INVOCATION], adapter=JUDGE, resumes="first")
    pauses = front.stats().pauses
    assert pauses is not None
    assert (pauses.returns_total, pauses.returns_on_device_total) == (1, 1)


def test_a_miss_says_that_the_invocation_stands_elsewhere(front: Frontend) -> None:
    first, _ = serve(front, "first", FIRST, adapter=JUDGE)
    received = front.serve("second", [*first, *range(62, 72), *INVOCATION], adapter=JUDGE)
    miss = done(received).miss
    assert miss is not None
    assert (miss.reason, miss.n_matched, miss.is_other_adapter) == ("invocation", len(HISTORY), False)
