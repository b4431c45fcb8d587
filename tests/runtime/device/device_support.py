"""A device whose parts the tests can see, and plans for it."""

import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from radixkv.checkpoints import Checkpoint
from radixkv.runtime.device.attention.reference import ReferenceAttention
from radixkv.runtime.device.batch import Batch, Batcher
from radixkv.runtime.device.kvpool import KVPool
from radixkv.runtime.device.models.decoder import Decoder
from radixkv.runtime.device.models.weights import load_weights, read_config
from radixkv.runtime.plan import Row, RowSampling, StepPlan
from support.checkpoints import VOCAB

GREEDY = RowSampling(temperature=0.0, top_k=0, top_p=1.0, seed=0, index=0)

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

CHECKPOINTS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "llama3": {"rope_parameters": _LLAMA3, "tie_word_embeddings": True, "num_attention_heads": 6},
    "whole": {"num_key_value_heads": 4, "head_dim": 10, "intermediate_size": 51},
}


def load_oracle(checkpoint: Checkpoint) -> LlamaForCausalLM:
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(
        checkpoint.folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model


def tokens_of(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, dtype="<i4").tobytes()


def random_ids(n: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


@contextmanager
def limited_memory() -> Iterator[None]:
    """A gigabyte more than now: code that lists what a corrupt count asks for fails within seconds."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


class OpenDevice:
    """The device's parts, assembled as the executor does, but giving hidden states' logits of every token."""

    def __init__(
        self, checkpoint: Checkpoint, *, page_size: int = 4, n_pages: int = 400, block_tokens: int = 256
    ) -> None:
        config = read_config(checkpoint)
        self.page_size = page_size
        self.model = Decoder(config, load_weights(checkpoint.folder, config), 1024)
        self.pool = KVPool(
            n_layers=config.n_layers,
            n_pages=n_pages,
            n_kv_heads=config.n_kv_heads,
            page_size=page_size,
            head_dim=config.head_dim,
        )
        self.attention = ReferenceAttention(self.pool, n_heads=config.n_heads, block_tokens=block_tokens)
        self._batcher = Batcher(page_size=page_size, max_rows=512, max_model_len=1024, n_pages=n_pages)
        self._free = list(range(n_pages))
        for page in self._free:
            self.pool.poison(page)

    def pages(self, n_tokens: int) -> tuple[int, ...]:
        """Poisoned pages for that many tokens, not in order."""
        n = -(-n_tokens // self.page_size)
        return tuple(self._free.pop(len(self._free) * 3 // 7) for _ in range(n))

    def pack(self, *rows: Row) -> Batch:
        return self._batcher.pack(StepPlan(0, rows))

    def run(self, *rows: Row) -> list[Tensor]:
        """One step: each row's logits, [tokens, vocab]."""
        with torch.inference_mode():
            batch = self.pack(*rows)
            self.attention.plan(batch)
            logits = self.model.logits(self.model(batch.ids, batch.positions, self.attention.run))
        return list(torch.split(logits, [row.n_tokens for row in rows]))

    def stored(self, pages: Sequence[int], n_tokens: int) -> Tensor:
        """K and V of a sequence's first tokens: [2, layers, kv_heads, tokens, head_dim]."""
        both = torch.stack([self.pool.k[:, list(pages)], self.pool.v[:, list(pages)]])
        return both.transpose(2, 3).flatten(3, 4)[:, :, :, :n_tokens].clone()


def row_of(
    ids: Sequence[int],
    pages: Sequence[int],
    *,
    slot: int = 0,
    start: int = 0,
    stop: int | None = None,
    write_start: int | None = None,
    sampling: RowSampling | None = None,
) -> Row:
    """The row that computes ``ids[start:stop]`` of a sequence whose whole table is ``pages``."""
    some = ids[start:stop]
    return Row(
        slot=slot,
        start=start,
        n_tokens=len(some),
        tokens=tokens_of(some),
        write_start=start if write_start is None else write_start,
        table_start=0,
        table_pages=tuple(pages),
        sampling=sampling,
    )
