"""Events of states: what prompts of hybrid models can go on from, by the events alone."""

from __future__ import annotations

from random import Random

import pytest

from radixkv.runtime.events.log import EventLog
from radixkv.runtime.events.messages import AllBlocksCleared, EventBatch, encode_batch
from radixkv.tree.node import Namespace
from radixkv.wire.messages import pack_tokens
from support.engine import Engine
from support.replica import BlockRemoved, BlockStored, Replica, decode
from support.state_events_machines import hashes_of

PAGE = 16
MESSAGE_END = 3


def text(n: int, first: int) -> list[int]:
    """Returns tokens that end no message."""
    return [10 + first, *(10 + (first * 31 + n_before * 7) % 89 for n_before in range(1, n))]


def recurrent() -> Engine:
    return Engine(300, PAGE, n_states=5, state_block_tokens=64, max_num_batched_tokens=2048)


def mixed() -> Engine:
    return Engine(300, PAGE, mixed_window=40, pages_per_slab=2, max_num_batched_tokens=2048)


class Subscriber:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.log = EventLog(engine.cache, engine.scheduler.tiers.changes(), shows_salted_tokens=True)
        self.replica = Replica()

    def take(self) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
        batch = encode_batch(EventBatch(0.0, events)) if (events := self.log.take()) else b""
        if not batch:
            return []
        self.replica.apply(batch)
        return decode(batch).events

    def n_usable(self, prompt: list[int]) -> int:
        return PAGE * self.replica.n_usable("GPU", hashes_of(Namespace(), prompt[:-1], PAGE))

    def n_pages(self, prompt: list[int]) -> int:
        """Returns the tokens of the pages that the device has, as one who knows no states counts them."""
        hashes = hashes_of(Namespace(), prompt[:-1], PAGE)
        known = [block_hash in self.replica.blocks["GPU"] for block_hash in hashes]
        return PAGE * [*known, False].index(False)


def test_a_state_is_told_with_its_page_and_goes_alone() -> None:
    one = recurrent()
    subscriber = Subscriber(one)
    system = [*text(200, 1), MESSAGE_END]
    prompt = [*system, *text(100, 2), MESSAGE_END, *text(3, 3)]
    one.serve(prompt, 1)
    stored = [event for event in subscriber.take() if isinstance(event, BlockStored)]
    pages, states = ([event for event in stored if event.group_idx == group] for group in (None, 1))
    hashes = hashes_of(Namespace(), prompt, PAGE)
    assert [block for event in pages for block in event.block_hashes] == hashes
    assert hashes[11] in {event.block_hashes[0] for event in states}, "192 tokens, below the system prompt's end"
    for event in states:
        at = hashes.index(event.block_hashes[0])
        assert (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) == ("mamba", None)
        assert (event.parent_block_hash, event.token_ids) == (hashes[at - 1], prompt[at * PAGE : (at + 1) * PAGE])
    assert all(event.kv_cache_spec_kind is None for event in pages)
    forked = [*system, *text(50, 5)]
    assert subscriber.n_usable(forked) == 192 == one.cache.matches([(Namespace(), pack_tokens(forked))])[0]
    for n in range(8):
        one.serve([*text(150, 20 + n), MESSAGE_END, *text(3, 3)], 1)
        subscriber.take()
    assert len(subscriber.replica.states["GPU"]) <= 5
    assert subscriber.n_usable(prompt) < subscriber.n_pages(prompt) == 304, "states were evicted, and no page"


def test_tails_have_the_window() -> None:
    one = mixed()
    subscriber = Subscriber(one)
    one.serve([*text(200, 1), MESSAGE_END, *text(3, 3)], 1)
    states = [event for event in subscriber.take() if isinstance(event, BlockStored) and event.group_idx]
    kinds = {(event.group_idx, event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) for event in states}
    assert kinds == {(1, "sliding_window", 40)}


@pytest.mark.parametrize("make", [recurrent, mixed])
def test_events_tell_what_matches_over_a_random_history(make: object) -> None:
    assert callable(make)
    one, random = make(), Random(7)
    subscriber = Subscriber(one)
    stems = [[*text(random.randrange(70, 300), n), MESSAGE_END] for n in range(6)]
    n_hits = n_overcounted = 0
    for _ in range(60):
        stem = random.choice(stems)
        prompt = [*stem[: random.randrange(1, 1 + len(stem))], *text(random.randrange(1, 90), random.randrange(60))]
        prompt = [*prompt, MESSAGE_END, *text(3, 3)] if random.random() < 0.7 else prompt
        if random.random() < 0.3:
            stems[random.randrange(6)] = prompt
        one.serve(prompt, random.randrange(1, 20))
        subscriber.take()
        for known in [*stems, prompt]:
            (expected,) = one.cache.matches([(Namespace(), pack_tokens(known))])
            assert subscriber.n_usable(known) == expected
            n_hits += expected > 0
            n_overcounted += subscriber.n_pages(known) > expected
        late = Replica()
        late.apply(encode_batch(EventBatch(0.0, list(subscriber.log.snapshot()))))
        assert late == subscriber.replica
    assert min(n_hits, n_overcounted) > 20
