"""A warm cache gives the same bits with choices, penalties, biases, logprobs, prompt logprobs and salts.

The reference runs each choice as a request of its own, with its own seed, alone on a server without a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from radixkv.checkpoints import Checkpoint, resolve
from radixkv.runtime.cache.block_table import BlockTable
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.request import Request
from radixkv.runtime.scheduler.running import RunningRequests
from radixkv.wire.messages import TokenLogprobs
from support.cases import nightly_but, rest_nightly
from support.checkpoints import save_checkpoint
from support.cpu_server import CpuServer, Logits, Output, ids, recorded_logits

N_TOKENS = 8
N_CHOICES = 3
SHARED = ids(41, seed=0)
PROMPTS = {10 * i: SHARED[: 12 + 7 * i] + ids(3 + 5 * i, i) for i in range(1, 5)}
"""Prompts by seed; the further choices of a prompt use the seeds after it."""

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.9, "repetition_penalty": 1.3},
    "biases": {
        "logit_bias": {3: 2.5, 17: -100.0, 40: 5.0},
        "min_tokens": 5,
        "stop_token_ids": tuple(range(0, 192, 3)),
    },
    "logprobs": {"logprobs": 4, "min_p": 0.02, "frequency_penalty": 0.4},
}


@dataclass
class Cold:
    outputs: dict[str, dict[int, Output]]
    logits: dict[str, Logits]
    prompt_logprobs: dict[int, list[TokenLogprobs]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = tmp_path_factory.mktemp("llama")
    save_checkpoint(path)
    return resolve(str(path))


@pytest.fixture(scope="module")
def cold(checkpoint: Checkpoint) -> Cold:
    cold, server = Cold({}, {}, {}), CpuServer(checkpoint, shares=False)
    for kind, sampling in KINDS.items():
        with recorded_logits() as seen:
            for seed, prompt in PROMPTS.items():
                for choice in range(N_CHOICES):
                    server.serve(seed + choice, prompt, N_TOKENS, **sampling)
        cold.outputs[kind], cold.logits[kind] = server.outputs, seen
        server.outputs = {}
    for seed, prompt in PROMPTS.items():
        server.serve(seed, prompt, 1, prompt_logprobs=2)
        cold.prompt_logprobs[seed] = server.prompt_logprobs[seed]
    return cold


@pytest.mark.nightly
def test_each_kind_of_sampling_changes_the_outputs(cold: Cold) -> None:
    texts = {kind: [tuple(output.tokens) for output in outputs.values()] for kind, outputs in cold.outputs.items()}
    assert all(len(set(outputs)) > len(outputs) // 2 for outputs in texts.values())
    assert len(set(map(tuple, texts.values()))) == len(KINDS)
    ends = [output.end_reason for output in cold.outputs["biases"].values()]
    assert "stop" in ends
    assert all(len(output.tokens) >= 5 for output in cold.outputs["biases"].values())
    assert all(len(output.logprobs) == N_TOKENS for output in cold.outputs["logprobs"].values())


def run_all(server: CpuServer, kind: str, *, salt: str = "") -> Logits:
    """Runs all prompts with all choices at once, and returns their logits."""
    with recorded_logits() as seen:
        server.serve_all(PROMPTS, N_TOKENS, n=N_CHOICES, salt=salt, **KINDS[kind])
    return seen


def assert_equal(cold: Cold, kind: str, server: CpuServer, logits: Logits) -> None:
    for seed, expected in cold.outputs[kind].items():
        output = server.outputs[seed]
        assert (output.tokens, output.end_reason) == (expected.tokens, expected.end_reason), seed
        assert output.logprobs == expected.logprobs, seed
        for index in range(len(expected.tokens)):
            assert torch.equal(logits[seed, index], cold.logits[kind][seed, index]), (seed, index)


def warm_server(checkpoint: Checkpoint, **settings: Any) -> CpuServer:
    server = CpuServer(checkpoint, **settings)
    server.serve(999, SHARED)
    return server


@pytest.mark.parametrize("kind", KINDS)
def test_choices_over_a_cached_prefix(checkpoint: Checkpoint, cold: Cold, kind: str) -> None:
    server = warm_server(checkpoint, max_rows=16)
    assert_equal(cold, kind, server, run_all(server, kind))
    assert all(server.outputs[seed].n_cached >= 12 for seed in PROMPTS)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", nightly_but(KINDS, "logprobs"))
def test_choices_with_few_batch_slots_and_chunked_prefill(checkpoint: Checkpoint, cold: Cold, kind: str) -> None:
    server = warm_server(checkpoint, max_rows=4, budget=9)
    assert_equal(cold, kind, server, run_all(server, kind))
    assert all(server.outputs[seed].n_cached >= 12 for seed in PROMPTS)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", nightly_but(KINDS, "logprobs"))
def test_choices_that_are_preempted(checkpoint: Checkpoint, cold: Cold, kind: str) -> None:
    server = CpuServer(checkpoint, n_pages=28, max_rows=8)
    assert_equal(cold, kind, server, run_all(server, kind))
    assert server.scheduler.n_preemptions > 0
    assert sum(server.outputs[seed].n_cached > 0 for seed in PROMPTS) > 0


def test_choices_without_a_cache(checkpoint: Checkpoint, cold: Cold) -> None:
    server = CpuServer(checkpoint, shares=False, max_rows=16)
    assert_equal(cold, "logprobs", server, run_all(server, "logprobs"))


def test_choices_of_another_salt(checkpoint: Checkpoint, cold: Cold) -> None:
    server = warm_server(checkpoint, max_rows=16)
    assert_equal(cold, "logprobs", server, run_all(server, "logprobs", salt="hers"))
    assert server.outputs[10].n_cached == 0
    assert_equal(cold, "logprobs", server, run_all(server, "logprobs", salt="hers"))
    assert server.outputs[10].n_cached >= 12


@pytest.mark.parametrize(
    "settings", rest_nightly([{}, {"budget": 9, "max_rows": 4}, {"n_pages": 28}], kept=(1,)), ids=str
)
def test_prompt_logprobs_of_cached_prompts(checkpoint: Checkpoint, cold: Cold, settings: dict[str, int]) -> None:
    server = warm_server(checkpoint, **settings)
    for _ in range(2):
        server.serve_all(PROMPTS, N_TOKENS, n=2, prompt_logprobs=2)
        for seed, prompt in PROMPTS.items():
            assert len(server.prompt_logprobs[seed]) == len(prompt) - 1
            assert server.prompt_logprobs[seed] == cold.prompt_logprobs[seed]
            assert server.outputs[seed].n_cached == 0, "a request for prompt logprobs does not read the cache"
            assert server.outputs[seed].tokens == cold.outputs["plain"][seed].tokens
    server.serve(10, PROMPTS[10])
    assert server.outputs[10].n_cached > 0, "a request for prompt logprobs adds its pages to the cache"


def leave_out_the_copies(patch: pytest.MonkeyPatch) -> None:
    original = PageCache.fork

    def mutant(self: PageCache, blocks: BlockTable, n_tokens: int, n_pages: int) -> BlockTable:
        second = original(self, blocks, n_tokens, n_pages)
        second.copies = []
        return second

    patch.setattr(PageCache, "fork", mutant)


def copy_another_page(patch: pytest.MonkeyPatch) -> None:
    original = PageCache.fork

    def mutant(self: PageCache, blocks: BlockTable, n_tokens: int, n_pages: int) -> BlockTable:
        second = original(self, blocks, n_tokens, n_pages)
        second.copies = [(blocks.pages[0], destination) for _, destination in second.copies]
        return second

    patch.setattr(PageCache, "fork", mutant)


def sample_with_the_leaders_seed(patch: pytest.MonkeyPatch) -> None:
    original = Request.next_sampling

    def mutant(self: Request) -> Any:
        if self.choice and self.leader is not None:
            self.sampling = self.leader.sampling
        return original(self)

    patch.setattr(Request, "next_sampling", mutant)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "mutant", [leave_out_the_copies, copy_another_page, sample_with_the_leaders_seed], ids=lambda m: m.__name__
)
def test_the_comparison_fails_for_each_fork_mutant(
    checkpoint: Checkpoint,
    cold: Cold,
    mutant: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutant(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        test_choices_over_a_cached_prefix(checkpoint, cold, "plain")


@pytest.mark.nightly
def test_the_comparison_fails_if_the_history_is_sent_once_only(
    checkpoint: Checkpoint, cold: Cold, monkeypatch: pytest.MonkeyPatch
) -> None:
    assign = RunningRequests.assign_batch_slot

    def mutant(self: RunningRequests, request: Request, *args: Any, **options: Any) -> bool:
        is_assigned = assign(self, request, *args, **options)
        request.needs_history = request.needs_history and not request.n_outputs
        return is_assigned

    monkeypatch.setattr(RunningRequests, "assign_batch_slot", mutant)
    with pytest.raises((AssertionError, KeyError)):
        test_choices_that_are_preempted(checkpoint, cold, "penalties")
