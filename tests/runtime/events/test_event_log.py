"""The events of a loop, as vLLM's subscribers decode them."""

from __future__ import annotations

import pytest

from radixkv.runtime.assemble import open_event_log
from radixkv.runtime.events.log import EventLog
from radixkv.runtime.events.messages import Event, EventBatch, encode_batch
from radixkv.tree.digest import chained_xxh3_64, namespace_digest
from radixkv.tree.node import Namespace
from radixkv.wire import cache_messages
from radixkv.wire import messages as wire
from radixkv.wire.adapter_messages import ServedAdapter
from support.fake_adapters import fake_adapters
from support.loop_frontend import Frontend
from support.replica import AllBlocksCleared, BlockRemoved, BlockStored, decode

PROMPT = list(range(1, 23))
"""Five pages and a half."""


def decoded(events: list[Event]) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
    batch = decode(encode_batch(EventBatch(12.5, events)))
    assert (batch.ts, batch.data_parallel_rank) == (12.5, 0)
    return batch.events


def hashes(tokens: list[int], salt: str = "") -> list[int]:
    digest, digests = namespace_digest(Namespace(salt=salt)), []
    for first in range(0, len(tokens) - 3, 4):
        digest = chained_xxh3_64(digest, wire.pack_tokens(tokens[first : first + 4]))
        digests.append(digest)
    return digests


def opened(*, shows_salted_tokens: bool = False, **settings: int) -> tuple[Frontend, EventLog]:
    front = Frontend(**settings)  # type: ignore[arg-type]
    return front, open_event_log(front.loop, shows_salted_tokens=shows_salted_tokens)


def test_whole_pages_are_announced_once_their_kv_is_computed() -> None:
    front, log = opened()
    front.submit("a", PROMPT, max_tokens=6)
    front.turn()
    assert log.take() == [], "the prompt is scheduled, and no result is there"
    front.turn()
    assert decoded(log.take()) == [
        BlockStored(hashes(PROMPT), None, PROMPT[:20], 4, None, "GPU", None),
    ]
    front.run()
    answer = PROMPT + front.received["a"].tokens[0]
    assert len(answer) == 28
    later = hashes(answer)[5:6]  # the KV of the last token is never computed
    assert decoded(log.take()) == [BlockStored(later, hashes(PROMPT)[-1], answer[20:24], 4, None, "GPU", None)]
    assert log.take() == []
    front.serve("b", PROMPT, max_tokens=1)
    assert log.take() == [], "nothing new"


def test_pages_of_an_adapter_have_its_name_and_hashes_of_their_own() -> None:
    adapters = [ServedAdapter(*one) for one in (("sql", "/a", "12ab"), ("same", "/b", "12ab"))]
    front = Frontend(adapters=fake_adapters(*adapters))
    log = open_event_log(front.loop, shows_salted_tokens=False)
    front.serve("a", PROMPT[:8], max_tokens=1, adapter="12ab")
    (stored,) = decoded(log.take())
    assert isinstance(stored, BlockStored)
    assert (stored.lora_name, stored.token_ids) == ("sql", PROMPT[:8])
    front.serve("b", PROMPT[:8], max_tokens=1)
    (plain,) = decoded(log.take())
    assert isinstance(plain, BlockStored)
    assert (plain.lora_name, plain.block_hashes) == (None, hashes(PROMPT[:8]))
    assert not set(plain.block_hashes) & set(stored.block_hashes)


def test_pages_behind_an_invocation_have_the_name_of_its_adapter() -> None:
    """Those before are the model's. Tokens are those of the prompt, also where the cache has a mark."""
    adapters = [ServedAdapter("judge", "/a", "12ab" * 16, (10,)), ServedAdapter("rank", "/b", "34cd" * 16, (10,))]
    front = Frontend(adapters=fake_adapters(*adapters))
    log = open_event_log(front.loop, shows_salted_tokens=False)
    front.serve("a", PROMPT, max_tokens=3, adapter="12ab" * 16)
    before, behind, later = [one for one in decoded(log.take()) if isinstance(one, BlockStored)]
    assert (before.lora_name, before.block_hashes, before.token_ids) == (None, hashes(PROMPT)[:2], PROMPT[:8])
    assert (behind.lora_name, behind.parent_block_hash, behind.token_ids) == (
        "judge",
        hashes(PROMPT)[1],
        PROMPT[8:20],
    )
    assert (later.lora_name, later.parent_block_hash) == ("judge", behind.block_hashes[-1])
    front.serve("b", PROMPT, max_tokens=1)
    (plain,) = decoded(log.take())
    assert isinstance(plain, BlockStored)
    assert (plain.lora_name, plain.block_hashes) == (None, hashes(PROMPT)[2:])
    front.serve("c", PROMPT, max_tokens=1, adapter="34cd" * 16)
    (other,) = decoded(log.take())
    assert isinstance(other, BlockStored)
    assert (other.lora_name, other.token_ids) == ("rank", PROMPT[8:20])
    assert len({*plain.block_hashes, *behind.block_hashes, *other.block_hashes}) == 9
    names = {event.block_hashes[-1]: event.lora_name for event in log.snapshot()}
    assert names[later.block_hashes[-1]] == "judge"
    front.loop.receive(cache_messages.Invalidate("i", wire.pack_tokens(PROMPT[:4])))
    assert decoded(log.take()) == [AllBlocksCleared()]
    assert not any(log._activated.values()), "nothing is kept of pages that are gone"


def test_a_branch_continues_the_page_that_it_shares() -> None:
    front, log = opened()
    front.serve("a", PROMPT, max_tokens=1)
    log.take()
    branch = [*PROMPT[:8], *range(60, 68)]
    front.serve("b", branch, max_tokens=1)
    assert decoded(log.take()) == [
        BlockStored(hashes(branch)[2:], hashes(PROMPT)[1], branch[8:], 4, None, "GPU", None)
    ]
    snapshot = list(log.snapshot())
    assert {block for event in snapshot for block in event.block_hashes} == {*hashes(PROMPT), *hashes(branch)}


def test_evicted_and_invalidated_pages_are_removed_once() -> None:
    front, log = opened(n_pages=12)
    for first in (1, 30):
        front.serve(f"r{first}", range(first, first + 22), max_tokens=1)
    log.take()
    front.serve("c", range(60, 82), max_tokens=1)
    removed, stored = decoded(log.take())
    assert isinstance(removed, BlockRemoved)
    assert isinstance(stored, BlockStored)
    assert set(removed.block_hashes) < set(hashes(PROMPT))
    assert len(removed.block_hashes) == len(set(removed.block_hashes)) > 0
    second = list(range(30, 50))
    front.loop.receive(cache_messages.Invalidate("i", wire.pack_tokens(second)))
    (removed,) = decoded(log.take())
    assert removed == BlockRemoved(hashes(second), "GPU")


def test_a_flush_clears_all_blocks_even_of_running_requests() -> None:
    front, log = opened()
    front.serve("a", PROMPT, max_tokens=1)
    front.submit("b", range(30, 52), max_tokens=8)
    front.turn(3)
    log.take()
    front.loop.receive(cache_messages.Flush("f"))
    assert decoded(log.take()) == [AllBlocksCleared()]
    front.run()
    assert log.take() == [], "the running request's pages are detached"
    assert list(log.snapshot()) == []


@pytest.mark.parametrize("shows_salted_tokens", [False, True])
def test_the_tokens_of_salted_prompts_are_withheld(*, shows_salted_tokens: bool) -> None:
    front, log = opened(shows_salted_tokens=shows_salted_tokens)
    front.serve("a", PROMPT, max_tokens=1, salt="hers")
    tokens = PROMPT[:20] if shows_salted_tokens else []
    expected = BlockStored(hashes(PROMPT, "hers"), None, tokens, 4, None, "GPU", None)
    assert decoded(log.take()) == decoded(list(log.snapshot())) == [expected]
    assert expected.block_hashes != hashes(PROMPT)
