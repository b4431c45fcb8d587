"""What one rank of ``test_gpu_ranks`` computes with the kernels of several GPUs, in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from radixkv.runtime.device.ops.cuda.collectives import CudaCollectives

HIDDEN = 1000
VOCAB = 5003
N_STEPS = 10_000


def compare_sums(rank: int, n_ranks: int, store: Path) -> list[str]:
    """Returns what differs from torch's sums and norms on this rank; empty if nothing does."""
    from radixkv.runtime.device.ops.base import as_tensor
    from radixkv.runtime.device.ops.cuda.collectives import CudaCollectives
    from radixkv.runtime.device.ops.cuda.fp8_rows import rows_of
    from radixkv.runtime.device.ops.cuda.layers import RMSNorm
    from radixkv.runtime.device.weights.shards import Shard

    torch.cuda.set_device(rank % torch.cuda.device_count())
    collectives = CudaCollectives(rank, n_ranks)
    collectives.allocate(512, HIDDEN, 300 * Shard(rank, n_ranks).head(VOCAB).size, 33, torch.bfloat16)
    collectives.connect(store, 60.0)
    wrong = compare_logits(collectives)
    weight = random_rows(1, 99)[0]
    for n_rows in (1, 3, 64, 128, 129, 512):
        parts = [random_rows(n_rows, 10 * n_rows + other) for other in range(n_ranks)]
        total = parts[0].float()
        for part in parts[1:]:
            total += part.float()
        expected = total.to(torch.bfloat16)
        collectives.part(0, n_rows).copy_(parts[rank])
        found = torch.empty_like(expected)
        collectives.sum_parts(0, found)
        if not torch.equal(found, expected):
            wrong.append(f"sum of {n_rows} rows")
        for half, scales in ((1, None), (0, "rows"), (1, "groups")):
            norm = RMSNorm(weight, 1e-5, False, scales, keeps_unrounded=scales == "groups")
            residual = random_rows(n_rows, 7)
            own = residual.clone()
            normed = rows_of(norm, residual)
            collectives.part(half, n_rows).copy_(parts[rank])
            collectives.sum_parts(half, normed, residual, norm)
            alone = norm.add(expected, own)
            same = torch.equal(residual, own)
            if isinstance(normed, torch.Tensor):
                same = same and torch.equal(normed, alone)
            else:
                same = same and torch.equal(normed.values[:n_rows].float(), alone.values[:n_rows].float())
                same = same and torch.equal(normed.scales[:n_rows], alone.scales[:n_rows])
                if norm.keeps_unrounded:
                    same = same and torch.equal(as_tensor(normed), as_tensor(alone))
            if not same:
                wrong.append(f"norm of {n_rows} rows with scales {scales}")
        collectives.part(0, 1).zero_()  # halves alternate
        collectives.sum_parts(0, found[:1])
        collectives.part(1, 1).zero_()
        collectives.sum_parts(1, found[:1])
    tokens = torch.arange(33, dtype=torch.int32, device="cuda") + 1000 * rank
    collectives.broadcast(tokens)
    if tokens.tolist() != list(range(33)):
        wrong.append(f"broadcast: {tokens.tolist()}")
    return wrong


def compare_logits(collectives: CudaCollectives) -> list[str]:
    """Returns what differs from the logits of one GPU, of many numbers of rows right after each other."""
    from radixkv.runtime.device.ops.cuda.divided_head import DividedHead
    from radixkv.runtime.device.ops.cuda.layers import Linear
    from radixkv.runtime.device.weights.layer_weights import LinearWeights

    weight = random_rows(VOCAB, 98)
    head = DividedHead(collectives, lambda part: Linear(part.weight, None), VOCAB, LinearWeights(weight))
    rows = [random_rows(1 + 37 * index % 300, index) for index in range(50)]
    found = [head(one, one.new_empty(len(one), VOCAB)) for one in rows]
    if collectives.rank:
        return []
    return [
        f"logits of {len(one)} rows"
        for logits, one in zip(found, rows, strict=True)
        # Of some 30 each; cuBLAS may round partial sums, in another way for other sizes.
        if not torch.allclose(logits.float(), one.float() @ weight.t().float(), rtol=0.02, atol=1.0)
    ]


def residual_after_many_steps(rank: int, n_ranks: int, store: Path) -> bytes:
    """Returns the bits of a residual stream to which the ranks add sums of changing numbers of rows."""
    from radixkv.runtime.device.ops.cuda.collectives import CudaCollectives
    from radixkv.runtime.device.ops.cuda.layers import RMSNorm

    torch.cuda.set_device(rank)
    collectives = CudaCollectives(rank, n_ranks)
    collectives.allocate(256, HIDDEN, 0, 33, torch.bfloat16)
    collectives.connect(store, 60.0)
    residual = random_rows(256, 3)
    norm = RMSNorm(random_rows(1, 4)[0], 1e-5, adds_one=False, out_scales=None)
    normed = torch.empty_like(residual)
    mine = random_rows(256, 20 + rank)
    for step in range(N_STEPS):
        n_rows, half = 1 + step * 37 % 256, step % 2
        # What is added depends on the sum before, and on this rank.
        torch.mul(normed[:n_rows], mine[:n_rows], out=collectives.part(half, n_rows))
        collectives.sum_parts(half, normed[:n_rows], residual[:n_rows], norm)
    return residual.cpu().view(torch.uint8).numpy().tobytes()


def random_rows(n_rows: int, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(n_rows, HIDDEN, device="cuda", generator=generator).to(torch.bfloat16)
