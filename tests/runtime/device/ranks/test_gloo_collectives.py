"""Sums over ranks with gloo, each rank in a thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from radixkv.runtime.device.ops.cpu.collectives import GlooCollectives

N_RANKS = 3


def on_each_rank(store: Path, parts: list[list[Tensor]]) -> list[list[Tensor]]:
    """Returns the sums of several tensors on each rank. ``parts`` are [ranks][tensors]."""

    def sums(rank: int) -> list[Tensor]:
        collectives = GlooCollectives(rank, N_RANKS)
        collectives.connect(store, 60.0)
        return [collectives.sum(part) for part in parts[rank]]

    with ThreadPoolExecutor(N_RANKS) as threads:
        return list(threads.map(sums, range(N_RANKS)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_summed_in_the_order_of_ranks_whatever_is_beside_it(tmp_path: Path, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    whole = [torch.randn(64, 257, generator=generator).to(dtype) for _ in range(N_RANKS)]
    parts = [[one, *(rows.contiguous() for rows in one.split([1, 2, 5, 56]))] for one in whole]
    found = on_each_rank(tmp_path / "store", parts)
    in_order = ((whole[0].float() + whole[1].float()) + whole[2].float()).to(dtype)
    for total, *rows in found:
        assert torch.equal(total, in_order)
        assert torch.equal(torch.cat(rows), in_order)


def test_rank_0_broadcasts(tmp_path: Path) -> None:
    def received(rank: int) -> list[int]:
        collectives = GlooCollectives(rank, N_RANKS)
        collectives.connect(tmp_path / "store", 60.0)
        tensor = torch.arange(4) + 10 * rank
        collectives.broadcast(tensor)
        return tensor.tolist()

    with ThreadPoolExecutor(N_RANKS) as threads:
        assert list(threads.map(received, range(N_RANKS))) == [[0, 1, 2, 3]] * N_RANKS
