"""Cold equals warm for all that a request may ask: choices, penalties, biases, logprobs, prompt logprobs, salts.

The oracle is each choice as a request of its own, with its own seed, alone on a server without a cache.
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
from radixkv.wire import TokenLogprobs
from support.checkpoints import save_checkpoint
from support.cpu_server import Answer, Logits, Server, ids, watched_logits

N_TOKENS = 8
N_CHOICES = 3
SHARED = ids(41, seed=0)
PROMPTS = {10 * i: SHARED[: 12 + 7 * i] + ids(3 + 5 * i, i) for i in range(1, 5)}
"""By seed; the choices draw from the seeds that follow."""

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.9, "repetition_penalty": 1.3},
    "edited": {
        "logit_bias": {3: 2.5, 17: -100.0, 40: 5.0},
        "min_tokens": 5,
        "stop_token_ids": tuple(range(0, 192, 3)),
    },
    "reported": {"logprobs": 4, "min_p": 0.02, "frequency_penalty": 0.4},
}


@dataclass
class Cold:
    answers: dict[str, dict[int, Answer]]
    logits: dict[str, Logits]
    scores: dict[int, list[TokenLogprobs]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = tmp_path_factory.mktemp("llama")
    save_checkpoint(path)
    return resolve(str(path))


@pytest.fixture(scope="module")
def cold(checkpoint: Checkpoint) -> Cold:
    cold, server = Cold({}, {}, {}), Server(checkpoint, shares=False)
    for kind, asked in KINDS.items():
        with watched_logits() as seen:
            for seed, prompt in PROMPTS.items():
                for choice in range(N_CHOICES):
                    server.add(seed + choice, prompt, N_TOKENS, **asked)
                    server.run()
        cold.answers[kind], cold.logits[kind] = server.answers, seen
        server.answers = {}
    for seed, prompt in PROMPTS.items():
        server.add(seed, prompt, 1, prompt_logprobs=2)
        server.run()
        cold.scores[seed] = server.scores[seed]
    return cold


def test_the_settings_matter(cold: Cold) -> None:
    texts = {kind: [tuple(answer.tokens) for answer in answers.values()] for kind, answers in cold.answers.items()}
    assert all(len(set(answers)) > len(answers) // 2 for answers in texts.values())
    assert len(set(map(tuple, texts.values()))) == len(KINDS)
    ends = [answer.end for answer in cold.answers["edited"].values()]
    assert "stop" in ends
    assert all(len(answer.tokens) >= 5 for answer in cold.answers["edited"].values())
    assert all(len(answer.logprobs) == N_TOKENS for answer in cold.answers["reported"].values())


def ask(server: Server, kind: str, *, salt: str = "") -> Logits:
    """All prompts with all choices, together."""
    with watched_logits() as seen:
        for seed, prompt in PROMPTS.items():
            server.add(seed, prompt, N_TOKENS, n=N_CHOICES, salt=salt, **KINDS[kind])
        server.run()
    return seen


def assert_equal(cold: Cold, kind: str, server: Server, logits: Logits) -> None:
    for seed, right in cold.answers[kind].items():
        answer = server.answers[seed]
        assert (answer.tokens, answer.end) == (right.tokens, right.end), seed
        assert answer.logprobs == right.logprobs, seed
        for index in range(len(right.tokens)):
            assert torch.equal(logits[seed, index], cold.logits[kind][seed, index]), (seed, index)


def warmed(checkpoint: Checkpoint, **settings: Any) -> Server:
    server = Server(checkpoint, **settings)
    server.add(999, SHARED)
    server.run()
    return server


@pytest.mark.parametrize("kind", KINDS)
def test_choices_over_a_cached_prefix(checkpoint: Checkpoint, cold: Cold, kind: str) -> None:
    server = warmed(checkpoint, max_rows=16)
    assert_equal(cold, kind, server, ask(server, kind))
    assert all(server.answers[seed].n_cached >= 12 for seed in PROMPTS)


@pytest.mark.parametrize("kind", KINDS)
def test_choices_that_wait_for_slots_and_are_chunked(checkpoint: Checkpoint, cold: Cold, kind: str) -> None:
    server = warmed(checkpoint, max_rows=4, budget=9)
    assert_equal(cold, kind, server, ask(server, kind))
    assert all(server.answers[seed].n_cached >= 12 for seed in PROMPTS)


@pytest.mark.parametrize("kind", KINDS)
def test_choices_that_are_retracted(checkpoint: Checkpoint, cold: Cold, kind: str) -> None:
    server = Server(checkpoint, n_pages=28, max_rows=8)
    assert_equal(cold, kind, server, ask(server, kind))
    assert server.scheduler.n_preemptions > 0
    assert sum(server.answers[seed].n_cached > 0 for seed in PROMPTS) > 0


def test_choices_without_a_cache(checkpoint: Checkpoint, cold: Cold) -> None:
    server = Server(checkpoint, shares=False, max_rows=16)
    assert_equal(cold, "reported", server, ask(server, "reported"))


def test_choices_of_another_salt(checkpoint: Checkpoint, cold: Cold) -> None:
    server = warmed(checkpoint, max_rows=16)
    assert_equal(cold, "reported", server, ask(server, "reported", salt="hers"))
    assert server.answers[10].n_cached == 0
    assert_equal(cold, "reported", server, ask(server, "reported", salt="hers"))
    assert server.answers[10].n_cached >= 12


@pytest.mark.parametrize("settings", [{}, {"budget": 9, "max_rows": 4}, {"n_pages": 28}], ids=str)
def test_prompt_logprobs_of_cached_prompts(checkpoint: Checkpoint, cold: Cold, settings: dict[str, int]) -> None:
    server = warmed(checkpoint, **settings)
    for _ in range(2):
        for seed, prompt in PROMPTS.items():
            server.add(seed, prompt, N_TOKENS, n=2, prompt_logprobs=2)
        server.run()
        for seed, prompt in PROMPTS.items():
            assert len(server.scores[seed]) == len(prompt) - 1
            assert server.scores[seed] == cold.scores[seed]
            assert server.answers[seed].n_cached == 0, "it does not read the cache,"
            assert server.answers[seed].tokens == cold.answers["plain"][seed].tokens
    server.add(10, PROMPTS[10])
    server.run()
    assert server.answers[10].n_cached > 0, "but it fills it"


def leave_out_the_copies(patch: pytest.MonkeyPatch) -> None:
    fork = PageCache.fork

    def mutant(self: PageCache, blocks: BlockTable, n_tokens: int, n_pages: int) -> BlockTable:
        second = fork(self, blocks, n_tokens, n_pages)
        second.copies = []
        return second

    patch.setattr(PageCache, "fork", mutant)


def copy_another_page(patch: pytest.MonkeyPatch) -> None:
    fork = PageCache.fork

    def mutant(self: PageCache, blocks: BlockTable, n_tokens: int, n_pages: int) -> BlockTable:
        second = fork(self, blocks, n_tokens, n_pages)
        second.copies = [(blocks.pages[0], destination) for _, destination in second.copies]
        return second

    patch.setattr(PageCache, "fork", mutant)


def draw_from_the_leaders_seed(patch: pytest.MonkeyPatch) -> None:
    sampling = Request.next_sampling

    def mutant(self: Request) -> Any:
        if self.choice and self.leader is not None:
            self.sampling = self.leader.sampling
        return sampling(self)

    patch.setattr(Request, "next_sampling", mutant)


@pytest.mark.parametrize(
    "mutant", [leave_out_the_copies, copy_another_page, draw_from_the_leaders_seed], ids=lambda m: m.__name__
)
def test_a_broken_fork_is_found(
    checkpoint: Checkpoint,
    cold: Cold,
    mutant: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutant(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        test_choices_over_a_cached_prefix(checkpoint, cold, "plain")


def test_a_history_that_is_not_sent_again_is_found(
    checkpoint: Checkpoint, cold: Cold, monkeypatch: pytest.MonkeyPatch
) -> None:
    seat = RunningRequests._assign

    def mutant(self: RunningRequests, request: Request, blocks: BlockTable) -> None:
        seat(self, request, blocks)
        request.needs_history = request.needs_history and not request.n_outputs

    monkeypatch.setattr(RunningRequests, "_assign", mutant)
    with pytest.raises((AssertionError, KeyError)):
        test_choices_that_are_retracted(checkpoint, cold, "penalties")
