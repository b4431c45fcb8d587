"""The real loop, cache and CPU device over a small checkpoint, with free pages poisoned by NaN."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from radixkv import wire
from radixkv.checkpoints import Checkpoint
from radixkv.config import SchedulerConfig
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.device.executor_cpu import CpuExecutor
from radixkv.runtime.device.sampling.cpu.sampler import Sampled, Sampler
from radixkv.runtime.loop import Loop
from radixkv.runtime.scheduler.scheduler import Scheduler
from radixkv.runtime.step.plan import RowSampling
from radixkv.sampling import SamplingParams
from radixkv.tree.node import Namespace
from support.checkpoints import VOCAB
from support.engine import token_bytes

PAGE_SIZE = 4
Logits = dict[tuple[int, int], Tensor]


@contextmanager
def watched_logits() -> Iterator[Logits]:
    """What every sampled token is drawn from, by the request's seed and the token's number."""
    seen: Logits = {}
    sample = Sampler.sample

    def spy(
        self: Sampler, rows: Tensor, batch_slots: Sequence[int], sampling: Sequence[RowSampling]
    ) -> list[Sampled | None]:
        for row, how in zip(rows, sampling, strict=True):
            seen[how.seed, how.index] = row.clone()
        return sample(self, rows, batch_slots, sampling)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sampler, "sample", spy)
        yield seen


class PoisonedPages(list[int]):
    def __init__(self, executor: CpuExecutor, pages: Iterable[int]) -> None:
        super().__init__()
        self.executor = executor
        self += pages

    def __iadd__(self, pages: Iterable[int]) -> PoisonedPages:
        for page in (pages := list(pages)):
            self.executor.pool.poison(page)
        self.extend(pages)
        return self


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[wire.TokenLogprobs] = field(default_factory=list)
    n_cached: int = -1
    end: str = ""


class Server:
    """A loop with its device, and what it answered, by the seed that each choice draws from."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        n_pages: int = 200,
        budget: int = 512,
        max_rows: int = 8,
        page_size: int = PAGE_SIZE,
        shares: bool = True,
    ) -> None:
        self.executor = CpuExecutor(
            checkpoint,
            page_size=page_size,
            max_rows=max_rows,
            max_model_len=512,
            kv_cache_memory_bytes=1,
            max_total_tokens=n_pages * page_size,
        )
        self.cache = PageCache(n_pages, page_size, shares=shares)
        self.cache._free = PoisonedPages(self.executor, self.cache._free)
        config = SchedulerConfig(max_num_seqs=max_rows, max_num_batched_tokens=budget)
        self.scheduler = Scheduler(self.cache, config)
        self.loop = Loop(self.scheduler, self.executor, max_model_len=512)
        self.answers: dict[int, Answer] = {}
        self.scores: dict[int, list[wire.TokenLogprobs]] = {}

    def add(
        self,
        seed: int,
        prompt: list[int],
        n_tokens: int = 6,
        *,
        salt: str = "",
        temperature: float = 0.7,
        n: int = 1,
        **asked: Any,
    ) -> None:
        settings = {"top_p": 0.95, "top_k": 50, **asked}
        params = SamplingParams(n=n, temperature=temperature, seed=seed, max_tokens=n_tokens, **settings)
        assert self.loop.receive(wire.Submit(str(seed), token_bytes(prompt), params, salt)) == []
        self.answers |= {seed + choice: Answer() for choice in range(n)}
        self.scores[seed] = []

    def run(self) -> None:
        while self.loop.has_work:
            for message in self.loop.turn():
                match message:
                    case wire.Tokens(items, prompts):
                        for item in items:
                            answer = self.answers[int(item.id) + item.choice]
                            answer.tokens.append(int.from_bytes(item.tokens, "little"))
                            answer.logprobs += item.logprobs or []
                            answer.end = item.finish_reason or ""
                        for stretch in prompts:
                            scores = self.scores[int(stretch.id)]
                            assert stretch.start == len(scores) + 1, "in order, each position once"
                            scores += stretch.items
                    case wire.Done():
                        self.answers[int(message.id)].n_cached = message.n_cached_tokens
                    case wire.Failed():
                        self.answers[int(message.id)].end = message.code
            self.loop.check()
            choices = (choice for live in self.loop._live.values() for choice in live.choices)
            assert not any(choice.bypasses_tree for choice in choices), "NaN was read, or computed"

    def stored(self, tokens: list[int], salt: str = "") -> Tensor:
        """K and V of a sequence, as far as the tree has its pages: [2, layers, pages, kv_heads, page_size, dim]."""
        blocks = self.cache.open(Namespace(salt=salt), token_bytes(tokens))
        pages = list(blocks.pages)
        self.cache.close(blocks)
        return torch.stack([self.executor.pool.k[:, pages], self.executor.pool.v[:, pages]])


def ids(n_tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(n_tokens)]
