"""Each scheme of the study by hand, on random requests, and pages compared with the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from radixkv.lab.studies.paging.allocators import BestFitAllocator, BuddyAllocator
from radixkv.lab.studies.paging.contiguous import (
    ContiguousScheme,
    reserve_exact_length,
    reserve_factor,
    reserve_maximum,
    reserve_power_of_two,
    reserve_stored,
)
from radixkv.lab.studies.paging.memory import SlotUsage, average_shares
from radixkv.lab.studies.paging.paged import PagedScheme
from radixkv.lab.studies.paging.recommendation import recommend
from radixkv.lab.studies.paging.schemes import SCHEMES, Granule, Pool, granule_tokens
from radixkv.lab.studies.paging.sequences import SimulatedSequence, TokenRange, TokenRangeSource, Turn
from radixkv.lab.studies.paging.simulation import Scheme
from radixkv.runtime.request import GREEDY
from support.cases import covering, examples
from support.engine import Engine

POOL_TOKENS = 250
"""No multiple of a page or granule."""
LONGEST = 128
KIB_64, MIB_2, MIB_2_OF_ALL_LAYERS = Granule(1 << 16), Granule(1 << 21), Granule(1 << 21, 32)

NAMED: dict[str, Callable[[], Scheme]] = {
    name: lambda make=make: make(Pool(POOL_TOKENS, LONGEST, 20.0, 16, KIB_64, has_choices=True))
    for name, make in SCHEMES.items()
}


def turn(token_ranges: TokenRangeSource, n_prompt: int, n_answer: int, prefix: Sequence[TokenRange] = ()) -> Turn:
    return Turn((SimulatedSequence((*prefix, token_ranges.new(n_prompt)), token_ranges.new(n_answer)),))


def step(scheme: Scheme) -> SlotUsage:
    scheme.begin()
    usage = scheme.slot_usage()
    scheme.end()
    return usage


def test_reservation_to_the_maximum_by_hand() -> None:
    token_ranges = TokenRangeSource()
    scheme = ContiguousScheme(BestFitAllocator(40), reserve_maximum(16))
    for n_prompt, n_answer in ((5, 3), (2, 1), (1, 1)):
        scheme.add(turn(token_ranges, n_prompt, n_answer))
    # 5 and 2 tokens are stored; the first will store 7 (its third token is never attended to), the second no more.
    assert step(scheme) == SlotUsage(
        occupied=7, reserved=2, internal=32 - 9, external=0, free=8, cached=0, duplicate=0, stored=7, entries=2
    )
    # The second has ended, and the third has its slots.
    assert step(scheme) == SlotUsage(
        occupied=7, reserved=1, internal=32 - 8, external=0, free=8, cached=0, duplicate=0, stored=7, entries=2
    )
    assert step(scheme).allocated == 16
    assert step(scheme).allocated == 0


def test_free_slots_in_the_wrong_place_are_external() -> None:
    token_ranges = TokenRangeSource()
    scheme = ContiguousScheme(BestFitAllocator(12), reserve_exact_length)
    for n_prompt, n_answer in ((4, 1), (4, 9), (4, 1), (8, 1)):
        scheme.add(turn(token_ranges, n_prompt, n_answer))
    assert step(scheme).external == 0, "the second needs 12 slots, more than are free"
    assert scheme.n_waiting == 3
    scheme = ContiguousScheme(BestFitAllocator(12), reserve_exact_length)
    for n_prompt, n_answer in ((4, 1), (2, 3), (4, 1), (8, 1)):
        scheme.add(turn(token_ranges, n_prompt, n_answer))
    assert step(scheme)[:6] == (10, 2, 0, 0, 0, 0)
    slot_usage = step(scheme)  # 4 slots are free on either side of the second, and the next request needs 8
    assert (slot_usage.external, slot_usage.free) == (8, 0)


def test_a_buddy_rounds_what_is_reserved() -> None:
    token_ranges = TokenRangeSource()
    oracle, powers = (
        ContiguousScheme(BuddyAllocator(64), reserve_exact_length),
        ContiguousScheme(BuddyAllocator(64), reserve_power_of_two(64)),
    )
    for scheme in (oracle, powers):
        scheme.add(turn(token_ranges, 12, 5))
    # 16 are stored in the end, which is one extent; an answer rounded up to 8 makes 20, so an extent of 32.
    assert step(oracle)[:3] == (12, 4, 0)
    assert step(powers)[:3] == (12, 4, 16)


def test_pages_by_hand() -> None:
    token_ranges = TokenRangeSource()
    scheme = PagedScheme(32, 4)
    scheme.add(turn(token_ranges, 6, 4))  # 6 to 9 tokens: 2 pages, then 3
    assert step(scheme)[:6] == (6, 2, 0, 0, 24, 0)
    assert step(scheme)[:6] == (7, 1, 0, 0, 24, 0)
    assert step(scheme)[:6] == (8, 0, 0, 0, 24, 0)
    assert step(scheme)[:6] == (9, 0, 3, 0, 20, 0)
    assert step(scheme)[:6] == (0, 0, 0, 0, 24, 8), "whole pages stay cached for requests with the same prompt"


def test_choices_share_whole_pages_and_copy_the_rest() -> None:
    token_ranges = TokenRangeSource()
    prompt = (token_ranges.new(10),)
    scheme = PagedScheme(64, 4)
    scheme.add(Turn(tuple(SimulatedSequence(prompt, token_ranges.new(5)) for _ in range(3))))
    first = step(scheme)
    assert (first.occupied, first.duplicate) == (10, 0)
    second = step(scheme)  # 8 shared, then 2 of the prompt in each; the first has a token of its answer
    assert (second.occupied, second.duplicate, second.stored) == (8 + 3 + 2 + 2, 2 * 2, 11 + 10 + 10)


def test_an_extent_that_is_full_is_copied_to_one_twice_as_long() -> None:
    scheme = ContiguousScheme(BuddyAllocator(64), reserve_stored)
    scheme.add(turn(TokenRangeSource(), 6, 8))  # stores 6 to 13 tokens: an extent of 8, then one of 16
    assert step(scheme)[:6] == (6, 2, 0, 0, 56, 0)
    assert step(scheme)[:6] == (7, 1, 0, 0, 56, 0)
    assert step(scheme)[:6] == (8, 0, 0, 0, 56, 0)
    copying = step(scheme)
    assert copying[:6] == (9 + 8, 4, 3, 0, 40, 0), "both extents are there while KV is copied"
    assert (copying.duplicate, copying.stored, copying.entries) == (8, 9, 1)
    assert step(scheme)[:6] == (10, 3, 3, 0, 48, 0)
    assert scheme.n_copied == 8


def test_the_youngest_makes_room_for_a_copy() -> None:
    token_ranges = TokenRangeSource()
    scheme = ContiguousScheme(BuddyAllocator(16), reserve_stored)
    for _ in range(2):
        scheme.add(turn(token_ranges, 4, 8))
    assert step(scheme)[:6] == (8, 0, 0, 0, 8, 0)
    scheme.add(turn(token_ranges, 4, 8))
    # The first takes the free half. The second is full too, and has to wait until the first's old extent is free.
    copying = step(scheme)
    assert copying[:6] == (5 + 4, 3, 0, 0, 4, 0)
    assert (copying.duplicate, scheme.n_preemptions) == (4, 1)
    assert scheme.n_waiting == 2, "the third would fit, but waits behind the second"
    restarted = step(scheme)
    assert restarted[:6] == (6 + 5, 2 + 3, 0, 0, 0, 0)
    assert (scheme.n_waiting, scheme.n_copied) == (1, 4), "the second computes its tokens again, copying nothing"


def test_a_sequence_that_is_too_long_to_be_copied_restarts() -> None:
    scheme = ContiguousScheme(BuddyAllocator(16), reserve_stored)
    scheme.add(turn(TokenRangeSource(), 8, 9))  # 8 and 16 slots do not fit beside each other
    assert step(scheme)[:6] == (8, 0, 0, 0, 8, 0)
    assert step(scheme)[:6] == (9, 7, 0, 0, 0, 0)
    assert (scheme.n_preemptions, scheme.n_copied) == (1, 0)
    assert [step(scheme).occupied for _ in range(8)] == [10, 11, 12, 13, 14, 15, 16, 0]


def test_an_eighth_more_than_expected_is_reserved() -> None:
    token_ranges = TokenRangeSource()
    scheme = ContiguousScheme(BestFitAllocator(64), reserve_factor(32, mean_answer=4.0))
    scheme.add(turn(token_ranges, 4, 10))  # 1.125 x (4 + 4) = 9 slots; stores up to 13 tokens
    scheme.add(turn(token_ranges, 4, 2))  # stores 5 of 9
    assert step(scheme)[:6] == (4 + 4, 5 + 1, 4, 0, 46, 0)
    assert step(scheme)[:6] == (5 + 5, 4, 4, 0, 46, 0)
    for _ in range(4):
        step(scheme)
    # The tenth token does not fit: 1.125 x 10 = 11.25, so 12 slots, for the sequence that will need 13.
    assert step(scheme)[:6] == (10 + 9, 2, 0, 0, 64 - 12 - 9, 0)
    assert step(scheme)[:6] == (11, 1, 0, 0, 52, 0)


def test_without_a_tree_each_choice_copies_the_prompt() -> None:
    token_ranges = TokenRangeSource()
    prompt = (token_ranges.new(10),)
    scheme = PagedScheme(64, 4, sharing="nothing")
    scheme.add(Turn(tuple(SimulatedSequence(prompt, token_ranges.new(5)) for _ in range(3))))
    first = step(scheme)
    assert (first.occupied, first.duplicate) == (10, 0), "the prompt is computed once"
    second = step(scheme)
    assert (second.occupied, second.duplicate, second.stored) == (11 + 10 + 10, 20, 31)
    assert second.entries == 9
    for _ in range(5):
        last = step(scheme)
    assert last[:6] == (0, 0, 0, 0, 64, 0), "nothing stays cached"


def test_choices_share_the_prompt_without_a_tree_of_all_requests() -> None:
    """Copy-on-write: the 8 tokens of whole pages are shared, and each choice has its own page of the last 2."""
    token_ranges = TokenRangeSource()
    prompt = (token_ranges.new(10),)
    scheme = SCHEMES["paged"](Pool(64, 64, 5.0, 4, has_choices=True))
    for _ in range(2):  # the second request has the same prompt, and shares nothing with the first
        scheme.add(Turn(tuple(SimulatedSequence(prompt, token_ranges.new(5)) for _ in range(3))))
    first = step(scheme)
    assert (first.occupied, first.duplicate) == (10 + 10, 10)
    second = step(scheme)
    assert (second.occupied, second.stored) == (2 * (8 + 3 + 2 + 2), 2 * (11 + 10 + 10))
    assert second.duplicate == 10 + 4 * 2, "the second's prompt, and the last page in two choices of each"
    for _ in range(5):
        last = step(scheme)
    assert last[:6] == (0, 0, 0, 0, 64, 0), "nothing stays cached"


def test_measures_by_hand() -> None:
    """A pool of 100 slots in one step, and of as many that are all free in another."""
    usage = SlotUsage(
        occupied=40, reserved=6, internal=4, external=10, free=20, cached=20, duplicate=8, stored=60, entries=3
    )
    assert (usage.allocated, usage.pool) == (50, 100)
    shares = average_shares([usage])
    assert shares.utilisation_pct == 80  # MUR: 40 of 50
    assert shares.fragmentation_pct == 14  # FI: 4 + 10 of 100
    assert shares.duplicate_pct == 20  # DR: 8 of 40
    assert shares.lost_pct == pytest.approx(36)  # 10 are empty, and 8 hold copies, of 50
    assert (shares.tokens_per_slot, shares.entries_per_1000_tokens) == (1.5, 50)
    free = SlotUsage(0, 0, 0, 0, 100, 0, 0, 0, 0)
    both = average_shares([usage, free])
    assert (both.occupied_pct, both.free_pct, both.utilisation_pct) == (20, 60, 80)


def test_tokens_of_a_granule() -> None:
    """A token has 8 heads of 128 values of 2 bytes in a layer's K: 2 KiB."""
    assert (MIB_2.n_tokens, KIB_64.n_tokens, MIB_2_OF_ALL_LAYERS.n_tokens) == (1024, 32, 32)
    assert (MIB_2.n_tensors, KIB_64.n_tensors, MIB_2_OF_ALL_LAYERS.n_tensors) == (64, 64, 2)
    assert [granule.name for granule in (MIB_2, KIB_64, MIB_2_OF_ALL_LAYERS)] == ["2 MiB", "64 KiB", "2 MiB/32"]
    assert granule_tokens(1 << 21, n_layers=32) == 2_097_152 // (8 * 128 * 2 * 32)


def test_granules_by_hand() -> None:
    scheme = SCHEMES["vattention"](Pool(128, 128, 20.0, 16, KIB_64))
    scheme.add(turn(TokenRangeSource(), 40, 3))  # 42 tokens in the end, in 2 granules of each of 64 tensors
    usage = step(scheme)
    assert usage[:6] == (40, 2, 22, 0, 64, 0)
    assert usage.entries == 2 * 64
    large = SCHEMES["vattention"](Pool(4096, 128, 20.0, 16, MIB_2))
    large.add(turn(TokenRangeSource(), 40, 3))
    assert step(large)[:6] == (40, 2, 982, 0, 3072, 0)
    # K of all layers in one tensor: a granule of 2 MiB has 32 tokens again, and the sequence has 2 of K and 2 of V
    layered = SCHEMES["vattention"](Pool(128, 128, 20.0, 16, MIB_2_OF_ALL_LAYERS))
    layered.add(turn(TokenRangeSource(), 40, 3))
    usage = step(layered)
    assert usage[:6] == (40, 2, 22, 0, 64, 0)
    assert usage.entries == 2 * 2


def test_only_whole_granules_are_aliased() -> None:
    for name, n_shared in (("vattention-shared", 64), ("vattention", 0)):
        token_ranges = TokenRangeSource()
        prefix = (token_ranges.new(70),)
        scheme = SCHEMES[name](Pool(320, 128, 20.0, 16, KIB_64))
        scheme.add(turn(token_ranges, 10, 5, prefix))
        assert step(scheme)[:6] == (80, 4, 12, 0, 224, 0)
        scheme.add(turn(token_ranges, 10, 5, prefix))
        usage = step(scheme)
        assert usage.occupied == 81 + 80 - n_shared
        assert usage.duplicate == 70 - n_shared
        assert usage.stored == 161


lengths = st.tuples(st.sampled_from((0, 20, 40)), st.integers(1, 40), st.integers(1, 40), st.integers(1, 3))


@pytest.mark.parametrize("name", SCHEMES)
@examples(15)
@given(requests=st.lists(lengths, min_size=1, max_size=12))
def test_the_shares_of_the_pool_add_up_to_100(name: str, requests: list[tuple[int, int, int, int]]) -> None:
    token_ranges = TokenRangeSource()
    prefixes = {n: ((token_ranges.new(n),) if n else ()) for n in (0, 20, 40)}
    scheme = NAMED[name]()
    n_left = 0
    for n_prefix, n_prompt, n_answer, n_choices in requests:
        prompt = (*prefixes[n_prefix], token_ranges.new(n_prompt))
        answers = [token_ranges.new(n_answer) for _ in range(n_choices)]
        scheme.add(Turn(tuple(SimulatedSequence(prompt, answer) for answer in answers)))
        n_left += n_choices
    for _ in range(10_000):
        scheme.begin()
        usage = scheme.slot_usage()
        assert usage.pool == POOL_TOKENS
        assert min(usage) >= 0
        assert sum(average_shares([usage])[1:7]) == pytest.approx(100)
        n_left -= len(scheme.end())
        if not n_left:
            return
    raise AssertionError("the scheme does not come to an end")


@pytest.mark.parametrize(("shares", "n_choices", "n_pages"), covering([False, True], [1, 3], [200, 24]))
def test_pages_are_those_of_the_engine(shares: bool, n_choices: int, n_pages: int) -> None:
    """The engine computes on a fake device that checks the contents of every page, with tokens of its own."""
    limits: dict[str, Any] = {
        "max_num_seqs": 1000,
        "max_num_batched_tokens": 10_000,
        "schedule_policy": "fcfs",
        "num_reserved_decode_tokens": 16,
        "max_reserved_decode_share": 1 / 24,
    }
    engine = Engine(n_pages, 4, shares=shares, min_copied_tokens=4, **limits)
    scheme = PagedScheme(n_pages * 4, 4, sharing="prefixes" if shares else "nothing")
    token_ranges = TokenRangeSource()
    prefixes = [token_ranges.new(n_tokens) for n_tokens in (14, 9)]
    n_used: list[int] = []
    for number in range(200):
        if number < 20:
            prompt = (prefixes[number % 2], token_ranges.new(1 + number % 5))
            n_answer = 3 + 7 * number % 11
            scheme.add(Turn(tuple(SimulatedSequence(prompt, token_ranges.new(n_answer)) for _ in range(n_choices))))
            tokens = [token for part in prompt for token in part.tokens()]
            engine.add(tokens, n_answer, n=n_choices, sampling=replace(GREEDY, temperature=1.0))
        scheme.begin()
        plan = engine.launch()
        counts = [(one.n_free, one.n_available, one.tree.n_pages_leased) for one in (scheme.cache, engine.cache)]
        assert counts[0] == counts[1], f"step {number}"
        n_used.append(n_pages - counts[0][1])
        scheme.end()
        if plan is not None:
            engine.collect()
    assert scheme.n_waiting == 0
    assert engine.scheduler.is_idle
    assert n_used[-1] == 0
    if n_pages == 24:
        assert max(n_used) >= 22, "memory runs out"


def result(scheme: str, mean_batch: float, tokens_per_slot: float = 1.0) -> dict[str, Any]:
    sizes = {
        "page_size": 16 if scheme in ("paged", "radix") else None,
        "granule_bytes": None,
        "layers_in_a_tensor": None,
    }
    return {
        "workload": "w",
        "scheme": scheme,
        "mean_batch": mean_batch,
        "tokens_per_slot": tokens_per_slot,
        "utilisation_pct": 94.6,
        **sizes,
    }


def test_the_simplest_of_the_best_is_recommended() -> None:
    lines = [result("reserve-maximum", 30), result("oracle", 90), result("paged", 79), result("radix", 80, 1.5)]
    ((workload, text),) = recommend(lines)
    assert workload == "w"
    assert text.startswith("paged, 16, ")
    assert "2.6 times reserve-maximum" in text
    lines[2] = result("paged", 79, 1.2)
    ((_, text),) = recommend(lines)
    assert text.startswith("paged, 16, ")
    assert "choices share their prompts without a tree" in text
    lines[2] = result("paged", 70)
    ((_, text),) = recommend(lines)
    assert text.startswith("radix, 16, ")
    assert "1.5 tokens" in text
    assert recommend([result("oracle", 90)]) == []
