"""Batches of rows packed with texts, made by worker processes while the model trains."""

from __future__ import annotations

import itertools
import math
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from training.texts import HELD_OUT_SEEDS, Text, Texts


@dataclass(frozen=True)
class Stage:
    """What rows are like from a moment of the training on."""

    begins: float
    """Part of the training that is over, 0 to 1."""
    lengths: tuple[int, ...]
    """Of rows, in tokens; each batch draws one."""
    weights: tuple[float, ...]
    """How often each length is drawn."""


class Batches(IterableDataset[tuple[Tensor, Tensor]]):
    """Endless batches: token ids int32 and loss weights uint8 (tenths), ``[rows, length]`` each."""

    def __init__(
        self,
        tokenizer_file: Path,
        held_out: frozenset[str],
        stages: tuple[Stage, ...],
        batch_tokens: int,
        seed: int,
        progress: Synchronized[float],
    ) -> None:
        """``progress``: the part of the training that is over; the trainer moves it on."""
        self._tokenizer_file = tokenizer_file
        self._held_out = held_out
        self._stages = stages
        self._batch_tokens = batch_tokens
        self._seed = seed
        self._progress = progress

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        worker = get_worker_info()
        seed = HELD_OUT_SEEDS.stop + self._seed * 1000 + (worker.id if worker else 0)
        rng = random.Random(seed)
        texts = Texts(seed, self._held_out)
        tokenizer = Tokenizer.from_file(str(self._tokenizer_file))
        while True:
            over = self._progress.value
            stage = [stage for stage in self._stages if stage.begins <= over][-1]
            length = rng.choices(stage.lengths, stage.weights)[0]
            rows = [_row(rng, texts, tokenizer, length) for _ in range(max(1, self._batch_tokens // length))]
            ids, weights = zip(*rows, strict=True)
            yield torch.tensor(ids, dtype=torch.int32), torch.tensor(weights, dtype=torch.uint8)


def load_batches(batches: Batches, n_workers: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches from ``n_workers`` processes, or from this one."""
    loader: DataLoader[tuple[Tensor, Tensor]] = DataLoader(
        batches, batch_size=None, num_workers=n_workers, prefetch_factor=2 if n_workers else None
    )
    return iter(loader)


def encoded(tokenizer: Tokenizer, text: Text) -> tuple[list[int], list[int]]:
    """Token ids, and the weight of each: that of the piece in which it begins."""
    encoding = tokenizer.encode("".join(piece.text for piece in text), add_special_tokens=False)
    ends = list(itertools.accumulate(len(piece.text) for piece in text))
    weights: list[int] = []
    piece = 0
    for start, _ in encoding.offsets:
        while start >= ends[piece]:
            piece += 1
        weights.append(text[piece].weight)
    return encoding.ids, weights


def _row(rng: random.Random, texts: Texts, tokenizer: Tokenizer, length: int) -> tuple[list[int], list[int]]:
    """Texts of all lengths up to the row's, one behind the other; the last is cut off."""
    ids: list[int] = []
    weights: list[int] = []
    while len(ids) < length:
        left = length - len(ids)
        most = max(left, 150)
        n_tokens = (
            int(math.exp(rng.uniform(math.log(min(60, most)), math.log(most)))) if rng.random() < 0.6 else most
        )
        more_ids, more_weights = encoded(tokenizer, texts.text(n_tokens))
        ids += more_ids
        weights += more_weights
    return ids[:length], weights[:length]
