"""Pages that have been in the host tier give the same bits as computed ones, with the real loop and CPU device.

The copies run in threads beside the steps. Free pages are filled with NaN, so a copy that is too early or too late
turns every logit into NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from radixkv.checkpoints import Checkpoint
from radixkv.runtime.device.memory.copy_threads import CopyThreads
from radixkv.runtime.device.memory.cpu.host_slots import CpuHostSlots
from radixkv.runtime.tiers.host_tier import HostLoad, HostTier
from radixkv.wire import cache_messages
from radixkv.wire import messages as wire
from support.cases import rest_nightly
from support.cold_answers import ColdAnswers
from support.cpu_server import CpuServer, Logits, ids
from support.evicting import evict_all

SHARED = ids(41, seed=0)
PROMPTS = {10 * seed: SHARED[: 12 + 7 * seed] + ids(3 + 5 * seed, seed) for seed in range(1, 5)}
N_TOKENS = 9
HOST_BYTES = 4 << 20


@pytest.fixture(scope="module")
def cold(checkpoint: Checkpoint) -> ColdAnswers:
    return ColdAnswers(checkpoint, PROMPTS, N_TOKENS)


def tiered(checkpoint: Checkpoint, **settings: Any) -> CpuServer:
    """Returns a server whose pool holds about one prompt, and whose host tier holds all."""
    return CpuServer(checkpoint, host_memory_bytes=HOST_BYTES, **{"n_pages": 22, **settings})


def serve_in_turn(server: CpuServer, seeds: Iterable[int] = PROMPTS, **settings: Any) -> None:
    """Serves the prompts one after the other, so that each one evicts the one before."""
    for seed in seeds:
        server.serve(seed, PROMPTS[seed], N_TOKENS, **settings)
        server.finish_copies()


def test_a_full_hit_in_the_host_tier(checkpoint: Checkpoint, cold: ColdAnswers, logits: Logits) -> None:
    server = tiered(checkpoint)
    serve_in_turn(server)
    for seed in PROMPTS:
        evict_all(server.cache)
        serve_in_turn(server, [seed])
        assert server.outputs[seed].n_loaded >= len(PROMPTS[seed]) // 4 * 4 - 4
        cold.check(server, logits, [seed])


def test_a_partial_hit_in_the_host_tier(checkpoint: Checkpoint, cold: ColdAnswers, logits: Logits) -> None:
    server = tiered(checkpoint)
    server.serve(99, SHARED)
    server.finish_copies()
    for seed in PROMPTS:
        evict_all(server.cache)
        serve_in_turn(server, [seed])
        assert server.outputs[seed].n_loaded >= 12
        cold.check(server, logits, [seed])


def test_pages_that_were_loaded_while_their_requests_waited(
    checkpoint: Checkpoint, cold: ColdAnswers, logits: Logits
) -> None:
    server = tiered(checkpoint, n_pages=80, max_rows=1)
    serve_in_turn(server)
    evict_all(server.cache)
    server.serve_all(PROMPTS, N_TOKENS)
    cold.check(server, logits, PROMPTS)
    host, *_ = server.scheduler.tiers.stats()
    assert host is not None
    assert host.pages_loaded_ahead_used_by_waiting_total > 0
    assert (
        sum(server.outputs[seed].n_loaded for seed in PROMPTS)
        > host.pages_loaded_ahead_used_by_waiting_total * 4
        > 0
    )


@pytest.mark.parametrize("budget", rest_nightly([4, 7, 16], kept=(1,)))
def test_many_requests_in_chunks_under_pressure(
    checkpoint: Checkpoint, cold: ColdAnswers, logits: Logits, budget: int
) -> None:
    server = tiered(checkpoint, n_pages=40, budget=budget + 3, max_rows=4)
    for _ in range(3):
        server.serve_all(PROMPTS, N_TOKENS)
        cold.check(server, logits, [seed for seed in PROMPTS if server.outputs[seed].tokens])
        server.finish_copies()
        evict_all(server.cache)
    assert any(output.n_loaded > 0 for output in server.outputs.values())


def test_a_preempted_request_resumes_from_the_host_tier(
    checkpoint: Checkpoint, cold: ColdAnswers, logits: Logits
) -> None:
    server = tiered(checkpoint, n_pages=34)
    server.add(98, ids(8, 98), 80)
    server.add(97, ids(8, 97), 80)
    server.serve_all(PROMPTS, N_TOKENS)
    assert server.scheduler.n_preemptions > 0
    assert server.host_tier.counters.n_pages_loaded > 0
    cold.check(server, logits)


def test_two_requests_join_one_load(checkpoint: Checkpoint, cold: ColdAnswers, logits: Logits) -> None:
    server = tiered(checkpoint, n_pages=60)
    serve_in_turn(server, [40])
    evict_all(server.cache)
    server.add(40, PROMPTS[40], N_TOKENS)
    server.serve(41, PROMPTS[40], N_TOKENS)
    assert server.host_tier.counters.n_pages_loaded == len(PROMPTS[40]) // 4, "each page once"
    cold.check(server, logits, [40])


def test_salts_and_forks(checkpoint: Checkpoint, cold: ColdAnswers, logits: Logits) -> None:
    server = tiered(checkpoint, n_pages=60)
    serve_in_turn(server, [30])
    evict_all(server.cache)
    serve_in_turn(server, [30], salt="a")
    assert server.outputs[30].n_loaded == 0, "another salt's pages were loaded"
    evict_all(server.cache)
    serve_in_turn(server, [30], salt="a", n=3)
    assert server.outputs[30].n_loaded > 0
    cold.check(server, logits, [30], "a")


def test_an_abort_and_a_flush_during_a_load(checkpoint: Checkpoint, cold: ColdAnswers, logits: Logits) -> None:
    server = tiered(checkpoint, n_pages=60)
    serve_in_turn(server)
    for message in (wire.Cancel("10"), cache_messages.Flush("f")):
        evict_all(server.cache)
        server.add(10, PROMPTS[10], N_TOKENS)
        server.loop.turn()
        assert len(server.scheduler.tiers) == 1
        server.loop.receive(message)
        server.run()
        server.finish_copies()
        serve_in_turn(server)
        cold.check(server, logits)


def load_another_slot(patch: pytest.MonkeyPatch) -> None:
    load = CpuHostSlots.load

    def mutant(self: CpuHostSlots, slots: Sequence[int], pages: Sequence[int]) -> None:
        load(self, [*slots[1:], slots[0]], pages)

    patch.setattr(CpuHostSlots, "load", mutant)


def read_before_the_copy_is_done(patch: pytest.MonkeyPatch) -> None:
    begin = HostTier.begin_load

    def mutant(self: HostTier, namespace: Any, tokens: bytes, *args: int, **options: Any) -> HostLoad | None:
        load = begin(self, namespace, tokens, *args, **options)
        if load is not None:
            self.device.commit_copied(load.blocks, load.tokens, len(load.tokens) // 4)
            self.device.close(load.blocks)
            load.blocks = self.device.open(namespace, tokens)
        return load

    patch.setattr(HostTier, "begin_load", mutant)
    load_pages = CpuHostSlots.load
    patch.setattr(CpuHostSlots, "load", lambda self, slots, pages: load_pages(self, slots[:0], pages[:0]))


def believe_a_failed_copy(patch: pytest.MonkeyPatch) -> None:
    take = CopyThreads.take_finished
    patch.setattr(CpuHostSlots, "load", lambda self, slots, pages: 1 / 0)
    patch.setattr(CopyThreads, "take_finished", lambda self: [one._replace(error=None) for one in take(self)])


MUTANTS: tuple[Callable[[pytest.MonkeyPatch], None], ...] = (
    load_another_slot,
    read_before_the_copy_is_done,
    believe_a_failed_copy,
)


@pytest.mark.nightly
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_the_comparison_fails_for_each_mutant(
    checkpoint: Checkpoint,
    cold: ColdAnswers,
    logits: Logits,
    monkeypatch: pytest.MonkeyPatch,
    mutant: Callable[[pytest.MonkeyPatch], None],
) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        test_a_full_hit_in_the_host_tier(checkpoint, cold, logits)
