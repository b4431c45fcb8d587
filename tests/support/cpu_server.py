"""The real loop, cache and CPU executor with a small checkpoint; free pages are filled with NaN."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from radixkv.checkpoints import Checkpoint
from radixkv.checkpoints.fingerprint import fingerprint
from radixkv.runtime.assemble import assemble_loop
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.cache.free_pages import FreeList
from radixkv.runtime.device.cpu.executor import CpuExecutor
from radixkv.runtime.device.device_settings import DeviceSettings
from radixkv.runtime.device.sampling.cpu import SampledToken, Sampler
from radixkv.runtime.step.plan import RowSampling
from radixkv.runtime.tiers.host_tier import HostTier
from radixkv.runtime.tiers.load_choice import LoadChoice
from radixkv.runtime.tiers.load_cost import LoadCost
from radixkv.runtime.tiers.storage_tier import StorageTier
from radixkv.runtime.tiers.stores.file_store import FileStore
from radixkv.runtime.tiers.stores.page_keys import KVIdentity, root_key
from radixkv.settings.config import KVCacheDtype, LoadPolicy
from radixkv.tree.node import TOKEN_BYTES, Namespace
from radixkv.wire import messages as wire
from radixkv.wire.namespace import CacheNamespace
from radixkv.wire.sampling import SamplingParams
from support.checkpoints import VOCAB
from support.engine import token_bytes
from support.poison import poison
from support.scheduler import make_scheduler

PAGE_SIZE = 4
Logits = dict[tuple[int, int], Tensor]


@contextmanager
def recorded_logits() -> Iterator[Logits]:
    """Records the logits of every sampled token, by (seed of the choice, index of the token)."""
    recorded: Logits = {}
    sample = Sampler.sample

    def sample_and_record(
        self: Sampler, rows: Tensor, batch_slots: Sequence[int], sampling: Sequence[RowSampling], masks: Any
    ) -> list[SampledToken | None]:
        for row, row_sampling in zip(rows, sampling, strict=True):
            recorded[row_sampling.seed, row_sampling.index] = row.clone()
        return sample(self, rows, batch_slots, sampling, masks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sampler, "sample", sample_and_record)
        yield recorded


class PoisonedPages(FreeList):
    """A free list with all pages of a device, filled with NaN; fills pages with NaN again when they become free."""

    def __init__(self, executor: CpuExecutor) -> None:
        super().__init__()
        self.executor = executor
        self += reversed(range(executor.n_pages))

    def __iadd__(self, pages: Iterable[int]) -> PoisonedPages:
        poison(self.executor.pool, pages := list(pages))
        self.extend(pages)
        return self


@dataclass
class Output:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[wire.TokenLogprobs] = field(default_factory=list)
    n_cached: int = -1
    n_loaded: int = -1
    end_reason: str = ""


class CpuServer:
    """A loop with its device; collects the outputs by the seed of each choice."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        n_pages: int = 200,
        budget: int = 512,
        max_rows: int = 8,
        page_size: int = PAGE_SIZE,
        shares: bool = True,
        frees_behind: bool = True,
        max_model_len: int = 512,
        host_memory_bytes: int | None = None,
        cache_dir: Path | None = None,
        load_policy: LoadPolicy = "always",
        kv_cache_dtype: KVCacheDtype = "auto",
    ) -> None:
        self.executor = CpuExecutor(
            checkpoint,
            DeviceSettings(
                page_size=page_size,
                max_num_seqs=max_rows,
                max_model_len=max_model_len,
                kv_cache_memory_bytes=1,
                max_total_tokens=n_pages * page_size,
                kv_cache_dtype=kv_cache_dtype,
                max_num_batched_tokens=2048,
            ),
        )
        self.cache = PageCache(
            n_pages,
            page_size,
            is_sharing=shares,
            window=self.executor.window if frees_behind else None,
            min_copied_tokens=1,
            free_pages=PoisonedPages(self.executor),
        )
        self.host_tier: HostTier | None = None
        self.disk: StorageTier | None = None
        if host_memory_bytes is not None:
            host, copier, cost = PageCache(0, page_size), self.executor.open_copier(host_memory_bytes), LoadCost()
            if cache_dir is not None:
                store = FileStore(
                    cache_dir,
                    page_bytes=copier.page_bytes,
                    page_token_bytes=page_size * TOKEN_BYTES,
                    max_bytes=1 << 30,
                )
                self.disk = StorageTier(host, [store], self._root_key(checkpoint), copier.buffer, cost)
            self.host_tier = HostTier(self.cache, host, copier, self.disk, LoadChoice(load_policy, cost))
        self.scheduler = make_scheduler(
            self.cache,
            host_tier=self.host_tier,
            loads_ahead=True,
            max_num_seqs=max_rows,
            max_num_batched_tokens=budget,
        )
        self.loop = assemble_loop(self.scheduler, self.executor, max_model_len=max_model_len)
        self.outputs: dict[int, Output] = {}
        self.prompt_logprobs: dict[int, list[wire.TokenLogprobs]] = {}

    def add(
        self,
        seed: int,
        prompt: list[int],
        n_tokens: int = 6,
        *,
        salt: str = "",
        temperature: float = 0.7,
        n: int = 1,
        **sampling: Any,
    ) -> None:
        settings = {"top_p": 0.95, "top_k": 50, **sampling}
        params = SamplingParams(n=n, temperature=temperature, seed=seed, max_tokens=n_tokens, **settings)
        assert (
            self.loop.receive(wire.Submit(str(seed), token_bytes(prompt), params, CacheNamespace(cache_salt=salt)))
            == []
        )
        self.outputs |= {seed + choice: Output() for choice in range(n)}
        self.prompt_logprobs[seed] = []

    def serve(self, seed: int, prompt: list[int], n_tokens: int = 6, **options: Any) -> Output:
        """Adds a request and runs until the loop has no work; returns its first output."""
        self.add(seed, prompt, n_tokens, **options)
        self.run()
        return self.outputs[seed]

    def serve_all(self, prompts: Mapping[int, list[int]], n_tokens: int = 6, **options: Any) -> None:
        """Adds a request for each seed and its prompt, and runs until the loop has no work."""
        for seed, prompt in prompts.items():
            self.add(seed, prompt, n_tokens, **options)
        self.run()

    def run(self) -> None:
        while self.loop.has_work:
            if self.loop.is_waiting:
                self.loop.wait(1.0)
            for message in self.loop.turn():
                match message:
                    case wire.Tokens(items, prompt_logprobs):
                        for item in items:
                            output = self.outputs[int(item.id) + item.choice]
                            output.tokens.append(int.from_bytes(item.tokens, "little"))
                            output.logprobs += item.logprobs or []
                            output.end_reason = item.finish_reason or ""
                        for item_range in prompt_logprobs:
                            logprobs = self.prompt_logprobs[int(item_range.id)]
                            assert item_range.start == len(logprobs) + 1, (
                                "prompt logprobs come in order, each position once"
                            )
                            logprobs += item_range.items
                    case wire.Done():
                        self.outputs[int(message.id)].n_cached = message.cache_use.n_cached
                        self.outputs[int(message.id)].n_loaded = message.cache_use.n_loaded
                    case wire.Failed():
                        self.outputs[int(message.id)].end_reason = message.code
            self.loop.check()
            choices = (*self.scheduler.waiting, *self.scheduler.running, *self.scheduler.running.releasing)
            assert not any(choice.recovery.bypasses_tree for choice in choices), "a row read or computed NaN"

    def finish_copies(self) -> None:
        """Waits until everything that was offered to the other tiers is in them."""
        assert self.host_tier is not None
        while self.host_tier.is_busy or self.host_tier.n_offers or (self.disk is not None and self.disk.n_offers):
            self.loop.advance()
            if self.host_tier.is_busy:
                self.loop.wait(1.0)

    def _root_key(self, checkpoint: Checkpoint) -> bytes:
        page = self.executor.page_origin
        return root_key(
            KVIdentity(
                model=fingerprint(checkpoint.folder, "auto"),
                device=page.device,
                processor=page.processor,
                torch_version=page.torch_version,
                dtype=self.executor.dtype,
                kv_dtype=self.executor.kv_dtype,
                kv_scales=page.scales,
                layout=page.layout,
                page_size=self.cache.page_size,
            )
        )

    def stored(self, tokens: list[int], salt: str = "") -> Tensor:
        """Returns the cached K and V of a sequence: [2, 1, pages, values of all layers]."""
        pages = self.cached_pages(tokens, salt)
        parts = [torch.stack([part.k[:, pages], part.v[:, pages]]) for part in self.executor.pool.parts]
        return torch.cat([part.transpose(1, 2).flatten(2) for part in parts], -1).unsqueeze(1)

    def cached_pages(self, tokens: list[int], salt: str = "") -> list[int]:
        """Returns the pages that hold the cached prefix of a sequence, in token order."""
        blocks = self.cache.open(Namespace(salt=salt), token_bytes(tokens))
        pages = list(blocks.pages)
        self.cache.close(blocks)
        return pages

    @contextmanager
    def swapped_pages(self, sources: Mapping[int, int]) -> Iterator[None]:
        """Replaces the KV of each page in ``sources`` by that of the page it maps to, in all layers.

        Restores the pages at the exit.
        """
        pages, source_pages = list(sources), list(sources.values())
        tensors = [values for part in self.executor.pool.parts for values in part]
        originals = [tensor[:, pages].clone() for tensor in tensors]
        for tensor in tensors:
            tensor[:, pages] = tensor[:, source_pages]
        try:
            yield
        finally:
            for tensor, original in zip(tensors, originals, strict=True):
                tensor[:, pages] = original


def ids(n_tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(n_tokens)]
