"""A warm cache gives the same bits as a cold one: logits, KV and tokens, with the real loop, cache and CPU device.

Free pages are filled with NaN, so a read of KV that was not written turns every logit into NaN.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from radixkv.checkpoints import Checkpoint
from radixkv.runtime.cache.block_table import BlockTable
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.device.cpu.persistent_batch import PersistentBatch
from radixkv.runtime.device.ops.base import TokenInputs
from radixkv.runtime.device.pack import PackedStep
from radixkv.runtime.loop import Loop
from radixkv.tree.node import Namespace
from support.cases import rest_nightly
from support.cold_answers import ColdAnswers
from support.cpu_server import PAGE_SIZE, CpuServer, Logits, ids

SHARED = ids(41, seed=0)
PROMPTS = {seed: SHARED[: 12 + 7 * seed] + ids(3 + 5 * seed, seed) for seed in range(1, 5)}


@pytest.fixture(scope="module")
def cold(checkpoint: Checkpoint) -> ColdAnswers:
    return ColdAnswers(checkpoint, PROMPTS, n_tokens=6)


def test_in_a_batch(checkpoint: Checkpoint, cold: ColdAnswers, logits: Logits) -> None:
    server = CpuServer(checkpoint, shares=False)
    server.serve_all(PROMPTS)
    cold.check(server, logits)


def test_sharing_within_a_step(checkpoint: Checkpoint, cold: ColdAnswers, logits: Logits) -> None:
    server = CpuServer(checkpoint)
    server.serve_all(PROMPTS)
    assert sum(output.n_cached > 0 for output in server.outputs.values()) == len(PROMPTS) - 1
    cold.check(server, logits)


def test_after_a_partial_and_after_a_full_hit(checkpoint: Checkpoint, cold: ColdAnswers, logits: Logits) -> None:
    server = CpuServer(checkpoint)
    server.serve(99, SHARED)
    for n_cached in ({seed: 12 + 7 * seed for seed in PROMPTS}, {seed: len(PROMPTS[seed]) - 1 for seed in PROMPTS}):
        server.serve_all(PROMPTS)
        assert {seed: server.outputs[seed].n_cached for seed in PROMPTS} == n_cached, (
            "parts of pages are copied, too"
        )
        cold.check(server, logits)


@pytest.mark.parametrize("budget", rest_nightly(range(PAGE_SIZE, PAGE_SIZE + 5), kept=(0, 3)))
def test_chunked(checkpoint: Checkpoint, cold: ColdAnswers, logits: Logits, budget: int) -> None:
    server = CpuServer(checkpoint, budget=budget, max_rows=1)
    server.serve_all(PROMPTS)
    cold.check(server, logits)


@pytest.mark.parametrize("budget", rest_nightly(range(PAGE_SIZE, PAGE_SIZE + 5), kept=(0, 3)))
def test_the_first_chunk_starts_within_a_page(
    checkpoint: Checkpoint, cold: ColdAnswers, logits: Logits, budget: int
) -> None:
    server = CpuServer(checkpoint, budget=budget, max_rows=1)
    server.serve(99, SHARED)
    server.serve_all(PROMPTS)
    assert {seed: server.outputs[seed].n_cached for seed in PROMPTS} == {seed: 12 + 7 * seed for seed in PROMPTS}
    cold.check(server, logits)


def test_pages_that_are_copied_to_pages_that_are_copied(
    checkpoint: Checkpoint, cold: ColdAnswers, logits: Logits
) -> None:
    server = CpuServer(checkpoint)
    for n_tokens in (17, 18, 19, 23, 26, 33):  # each copies a part of the last page of the one before
        server.serve(1000 + n_tokens, [*SHARED[:n_tokens], *ids(9, n_tokens)])
    server.serve_all(PROMPTS)
    assert {seed: server.outputs[seed].n_cached for seed in (1, 2, 3)} == {1: 19, 2: 26, 3: 33}
    cold.check(server, logits)


@pytest.mark.parametrize("chunk", rest_nightly([1, 2, 3, 4, 5, 9, 16, 17], kept=(0, 5, 7)))
def test_chunks_of_any_size_with_pages_of_one_token(
    checkpoint: Checkpoint, cold: ColdAnswers, logits: Logits, chunk: int
) -> None:
    server = CpuServer(checkpoint, budget=chunk, max_rows=1, page_size=1)
    server.serve(2, PROMPTS[2])
    assert server.outputs[2].tokens == cold.outputs[2].tokens
    assert all(torch.equal(logits[2, i], cold.logits[2, i]) for i in range(6))


def test_evicted_and_recomputed(checkpoint: Checkpoint, cold: ColdAnswers, logits: Logits) -> None:
    server = CpuServer(checkpoint, n_pages=24)
    for _ in range(2):
        for seed, prompt in PROMPTS.items():
            server.serve(seed, prompt)
        cold.check(server, logits)
    assert server.cache.n_evicted > 0


def test_preempted(checkpoint: Checkpoint, cold: ColdAnswers, logits: Logits) -> None:
    server = CpuServer(checkpoint, n_pages=30)
    server.add(98, ids(8, 98), 80)
    server.add(97, ids(8, 97), 80)
    server.serve_all(PROMPTS)
    assert server.scheduler.n_preemptions > 0
    cold.check(server, logits)
    alone = CpuServer(checkpoint)
    alone.add(97, ids(8, 97), 80)
    alone.run()
    assert alone.outputs[97].tokens == server.outputs[97].tokens


def test_salted(checkpoint: Checkpoint, cold: ColdAnswers, logits: Logits) -> None:
    server = CpuServer(checkpoint)
    server.serve(99, SHARED)
    server.serve(4, PROMPTS[4], salt="a")
    assert server.outputs[4].n_cached == 0
    cold.check(server, logits, [4], "a")


def swap_the_first_two_pages(patch: pytest.MonkeyPatch) -> None:
    original = PageCache.open

    def mutant(self: PageCache, namespace: Namespace, tokens: bytes, *args: bool, **kwargs: bool) -> BlockTable:
        blocks = original(self, namespace, tokens, *args, **kwargs)
        blocks.pages[:2] = blocks.pages[:2][::-1]
        return blocks

    patch.setattr(PageCache, "open", mutant)
    patch.setattr(Loop, "check", lambda self: None)


def shift_positions_by_one(patch: pytest.MonkeyPatch) -> None:
    original = PersistentBatch.inputs

    def mutant(self: PersistentBatch, step: PackedStep) -> TokenInputs:
        inputs = original(self, step)
        if step.rows.starts.any():
            inputs.positions.add_(1)
        return inputs

    patch.setattr(PersistentBatch, "inputs", mutant)


def swap_the_last_two_pages(patch: pytest.MonkeyPatch) -> None:
    original = PageCache.commit

    def mutant(self: PageCache, blocks: BlockTable, tokens: bytearray, n_tokens: int, last_step: int) -> int:
        if n_tokens % self.page_size and n_tokens == len(tokens) // 4 and len(blocks.pages) > 1:
            blocks.pages[-1], blocks.pages[-2] = blocks.pages[-2], blocks.pages[-1]
        return original(self, blocks, tokens, n_tokens, last_step)

    patch.setattr(PageCache, "commit", mutant)
    patch.setattr(Loop, "check", lambda self: None)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "mutant", [swap_the_first_two_pages, shift_positions_by_one, swap_the_last_two_pages], ids=lambda m: m.__name__
)
def test_the_comparison_fails_for_each_mutant(
    checkpoint: Checkpoint,
    cold: ColdAnswers,
    logits: Logits,
    monkeypatch: pytest.MonkeyPatch,
    mutant: Callable[[pytest.MonkeyPatch], None],
) -> None:
    mutant(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        test_after_a_partial_and_after_a_full_hit(checkpoint, cold, logits)
