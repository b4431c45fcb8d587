"""Counts of cache misses: which places are named, and how many are kept."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress

import pytest
from msgspec.structs import replace

from radixkv.frontend.api.doctor import MAX_REPORTED_PLACES, doctor_fields
from radixkv.frontend.metrics.log import log_misses
from radixkv.frontend.miss_counts import MAX_PLACES, MissCounts
from radixkv.frontend.miss_report import without_contents, worst_miss
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire.cache_use import CacheUse
from radixkv.wire.messages import CacheMiss, Done, DraftUse, pack_tokens


def done(
    miss: CacheMiss | None, n_prompt: int = 100, n_cached: int = 0, *, n_copied: int = 0, n_output: int = 1
) -> Done:
    reason = "stop" if n_output else "abort"
    return Done("r", reason, n_prompt, n_output, CacheUse(n_cached, n_copied), 0.0, miss)


def differs(tokenizer: Tokenizer, place: int, position: int, common: str = "cch=", own: str = "a1") -> CacheMiss:
    n_matched = position - position % 16
    texts = (tokenizer.encode(text) for text in (common, own, "b2"))
    return CacheMiss("differs", n_matched, place, position, *texts)


def test_the_place_of_most_lost_tokens_is_named_first(tokenizer: Tokenizer) -> None:
    counts = MissCounts()
    for _ in range(8):
        counts.add(done(differs(tokenizer, 7, 41), 1041, 41))
    counts.add(done(CacheMiss("never_seen", 16, 3), 1016, 16))
    counts.add(done(CacheMiss("never_seen", 32, 4), 1032, 32))
    counts.add(done(None, 50, 50))
    counts.add(done(differs(tokenizer, 7, 41), n_output=0))  # cancelled before its prompt was computed
    report = doctor_fields(counts, tokenizer)
    assert (report["requests"], report["prompt_tokens"], report["lost_tokens"]) == (11, 8 * 1041 + 2098, 10_000)
    first, second = report["misses"]
    text = first.pop("text")
    assert all(word in text for word in ("80%", "token 41", "'cch='", "1,000 tokens a request"))
    assert first == {
        "reason": "differs",
        "matched_tokens": 32,
        "first_difference": {"position": 41, "after": "cch=", "prompt": "a1", "cached": "b2"},
        "requests": 8,
        "lost_tokens": 8000,
        "share": 0.8,
        "lost_tokens_per_request": 1000,
    }
    assert (second["reason"], second["requests"], second["lost_tokens"]) == ("never_seen", 2, 2000)


def test_without_contents_nobody_is_told_which_tokens_were_guessed() -> None:
    """Drafts may come from other clients' answers, token by token."""
    assert without_contents(replace(done(None, 500), drafts=DraftUse(3, 2))).drafts is None


def test_a_first_visit_is_new_though_the_cache_goes_on_with_other_tokens(tokenizer: Tokenizer) -> None:
    counts = MissCounts()
    for _ in range(3):
        counts.add(done(replace(differs(tokenizer, 7, 41), is_new=True), 1041, 41))
        counts.add(without_contents(done(replace(differs(tokenizer, 7, 41), is_new=True), 1041, 41)))
    counts.add(done(CacheMiss("never_seen", 0), 500))
    (only,) = doctor_fields(counts, tokenizer)["misses"]
    assert (only["reason"], only["requests"], only["lost_tokens"]) == ("never_seen", 7, 6500)
    assert "first_difference" not in only
    assert "7 requests" in only["text"]
    assert (counts.by_reason["never_seen"].n_requests, counts.by_reason["differs"].n_requests) == (7, 0)


def test_where_evictions_are_forgotten_a_nonce_still_has_its_place(tokenizer: Tokenizer) -> None:
    counts = MissCounts()
    nonce = replace(differs(tokenizer, 7, 41), reason="evicted_or_never_seen")
    for miss in (nonce, nonce, replace(nonce, is_new=True), CacheMiss("evicted_or_never_seen", 0, is_new=True)):
        counts.add(done(miss, 1041, 41))
    first, second = doctor_fields(counts, tokenizer)["misses"]
    assert first["reason"] == second["reason"] == "evicted_or_never_seen"
    assert sorted((first["requests"], second["requests"])) == [2, 2]
    placed = first if "first_difference" in first else second
    assert "cch=" in placed["text"]
    assert counts.by_reason["evicted_or_never_seen"].n_requests == 4


def test_nonces_that_begin_alike_by_chance_do_not_hide_where_they_begin(tokenizer: Tokenizer) -> None:
    counts = MissCounts()
    for position, n_misses in ((41, 30), (42, 70), (33, 2)):
        for _ in range(n_misses):
            counts.add(done(differs(tokenizer, 7, position)))
    (only,) = doctor_fields(counts, tokenizer)["misses"]
    assert (only["requests"], only["first_difference"]["position"]) == (102, 41)


def test_the_same_position_in_two_texts_is_two_places(tokenizer: Tokenizer) -> None:
    counts = MissCounts()
    counts.add(done(differs(tokenizer, 1, 41)))
    counts.add(done(differs(tokenizer, 2, 41)))
    assert len(counts.places()) == 2


@pytest.mark.parametrize("seed", range(3))
def test_of_any_number_of_places_those_that_lose_most_are_kept(tokenizer: Tokenizer, seed: int) -> None:
    rng, counts, exact = random.Random(seed), MissCounts(), Counter[int]()
    for step in range(20 * MAX_PLACES):
        is_frequent = step >= 2 * MAX_PLACES and rng.random() < 0.9
        place = rng.choice((1, 2, 3)) if is_frequent else 1000 + step
        n_prompt = rng.randrange(200, 400) if is_frequent else rng.randrange(10_000, 30_000)
        exact[place] += n_prompt
        counts.add(done(differs(tokenizer, place, 41), n_prompt))
    places = counts.places()
    assert len(places) == MAX_PLACES < len(exact)
    kept = {place.example.place: place for place in places}
    total = exact.total()
    for place, n_lost in exact.items():
        if n_lost > total / MAX_PLACES:
            assert kept[place].n_lost <= n_lost <= kept[place].n_lost + kept[place].n_uncertain
    report = doctor_fields(counts, tokenizer)
    assert len(report["misses"]) == MAX_REPORTED_PLACES
    assert report["lost_tokens"] == total


def test_without_contents_only_whole_pages_of_the_own_salt_are_told(tokenizer: Tokenizer) -> None:
    counts = MissCounts()
    hidden = without_contents(done(differs(tokenizer, 7, 41), n_cached=41, n_copied=9))
    assert (hidden.cache_use.n_cached, hidden.cache_use.n_copied) == (32, 0)
    counts.add(hidden)
    elsewhere = CacheMiss("other_namespace", 0, 0, 5, pack_tokens([1]), pack_tokens([2]), pack_tokens([3]), 16)
    counts.add(without_contents(done(elsewhere)))
    report = doctor_fields(counts, tokenizer)
    assert [place["reason"] for place in report["misses"]] == ["never_seen", "differs"]
    assert "first_difference" not in str(report)
    assert report["misses"][1]["matched_tokens"] == 32
    assert "cch" not in str(report)


def test_what_adapters_have_cached_is_no_avoidable_miss(tokenizer: Tokenizer) -> None:
    """Their KV differs, or that behind an invocation that has moved; what has another salt counts apart."""
    counts = MissCounts()
    moved = CacheMiss("invocation", 16, n_elsewhere=64)
    for miss in (
        moved,
        replace(moved, is_other_adapter=True),
        CacheMiss("other_namespace", 16, is_other_adapter=True),
    ):
        for _ in range(3):
            counts.add(done(miss, 40_000))
    texts = [place["text"] for place in doctor_fields(counts, tokenizer)["misses"]]
    assert sum("an invocation of an activated LoRA, which stands elsewhere" in text for text in texts) == 1
    assert sum("cached with another adapter, or without one" in text for text in texts) == 2
    assert worst_miss(counts, tokenizer, min_share=0.1, min_tokens=1) is None
    for _ in range(2):
        counts.add(done(CacheMiss("other_namespace", 16), 40_000))
    line = worst_miss(counts, tokenizer, min_share=0.1, min_tokens=1)
    assert line is not None
    assert "of 2 requests, are cached under another cache_salt" in line
    hidden = without_contents(done(moved)).miss
    assert hidden is not None
    assert (hidden.reason, hidden.n_elsewhere) == ("never_seen", None)


def test_a_report_of_nothing_has_no_misses() -> None:
    report = doctor_fields(MissCounts(), None)
    assert (report["requests"], report["lost_tokens"], report["misses"]) == (0, 0, [])


def logged(counts: MissCounts, tokenizer: Tokenizer | None) -> list[str]:
    lines: list[str] = []
    recent = iter([counts])

    async def run() -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(0.1):
                await log_misses(lambda: next(recent, MissCounts()), tokenizer, 0.001, write=lines.append)

    asyncio.run(run())
    return lines


def test_many_requests_that_miss_alike_are_one_line_in_the_log(tokenizer: Tokenizer) -> None:
    counts = MissCounts()
    for _ in range(100):
        counts.add(done(differs(tokenizer, 7, 41), 1041, 41))
    (line,) = logged(counts, tokenizer)
    assert "token 41" in line
    assert "cch=" in line


def test_what_cannot_be_avoided_or_is_little_is_not_logged(tokenizer: Tokenizer) -> None:
    new, little, once = MissCounts(), MissCounts(), MissCounts()
    for _ in range(100):
        new.add(done(CacheMiss("never_seen", 0), 10_000))
        little.add(done(differs(tokenizer, 7, 41), 50))
    once.add(done(differs(tokenizer, 7, 41), 100_000))
    assert [logged(counts, tokenizer) for counts in (new, little, once)] == [[], [], []]
