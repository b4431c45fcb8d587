"""The kernels of several GPUs on one: sums and norms against torch, where all other ranks have come already."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import triton
from kernel_support import DEVICE, check_close, integers, normal, on_kernels, poisoned
from torch import Tensor

from radixkv.runtime.device.ops.base import RmsFields
from radixkv.runtime.device.ops.cuda import rank_sums
from radixkv.runtime.device.ops.cuda.collectives import RenumberedStore
from radixkv.runtime.device.ops.cuda.divided_head import DividedHead
from radixkv.runtime.device.ops.cuda.layers import Linear
from radixkv.runtime.device.ops.cuda.rank_sums import MAX_PROGRAMS, Meeting, broadcast, gather_logits, sum_parts
from radixkv.runtime.device.weights.layer_weights import LinearWeights
from radixkv.runtime.device.weights.shards import Shard

pytestmark = on_kernels

PAST = 5
"""Number of meetings before the test."""


def meeting(rank: int, n_ranks: int, *, has_others: bool = True, n: int = 1) -> tuple[Meeting, list[Tensor]]:
    """Returns n meetings to which the others, or none of them, have come, and the flags of all ranks."""
    flags = [torch.full((n_ranks, MAX_PROGRAMS), PAST, dtype=torch.int32, device=DEVICE) for _ in range(n_ranks)]
    flags[rank] += n * has_others
    counts = torch.full((MAX_PROGRAMS,), PAST, dtype=torch.int32, device=DEVICE)
    gives_up = torch.zeros(1, dtype=torch.int32, pin_memory=DEVICE == "cuda")
    return Meeting(rank, addresses(flags), counts, gives_up), flags


def addresses(tensors: Sequence[Tensor]) -> Tensor:
    return torch.tensor([one.data_ptr() for one in tensors], device=DEVICE)


@pytest.mark.parametrize(("rank", "n_ranks"), [(0, 2), (3, 4)])
@pytest.mark.parametrize("n_rows", [1, 5, MAX_PROGRAMS + 3])
def test_sums(n_rows: int, rank: int, n_ranks: int) -> None:
    size = 48
    parts = [normal(n_rows, size, dtype=torch.bfloat16) for _ in range(n_ranks)]
    total = torch.stack([one.float() for one in parts]).sum(0)
    others, flags = meeting(rank, n_ranks)
    found = poisoned(n_rows, size, dtype=torch.bfloat16)
    sum_parts(addresses(parts), others, found)
    check_close(found, total)
    came = min(n_rows, MAX_PROGRAMS)
    for other in set(range(n_ranks)) - {rank}:
        assert flags[other][rank].tolist() == [PAST + 1] * came + [PAST] * (MAX_PROGRAMS - came)
    assert others.counts.tolist() == [PAST + 1] * came + [PAST] * (MAX_PROGRAMS - came)


@pytest.mark.parametrize(("n_rows", "last"), [(3, 0), (7, 0), (7, 1), (7, 2), (3 * MAX_PROGRAMS + 4, 1)])
def test_sums_in_two_shots(n_rows: int, last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank sums some rows. The last one that does so finds all sums, so its own are complete."""
    monkeypatch.setattr(rank_sums, "_MIN_SPARED_BYTES", 0)
    size, n_ranks = 48, 3
    parts = [normal(n_rows, size, dtype=torch.float16) for _ in range(n_ranks)]
    total = torch.stack([one.float() for one in parts]).sum(0).to(torch.float16)
    residual, weight = normal(n_rows, size, dtype=torch.float16), normal(size, dtype=torch.float16)
    expected = (total.float() + residual.float()).to(torch.float16)
    normed = expected.float() * (expected.float().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.float()
    for rank in sorted(range(n_ranks), key=lambda rank: rank == last):
        others, flags = meeting(rank, n_ranks, n=2)
        stream, found = residual.clone(), poisoned(n_rows, size, dtype=torch.float16)
        sum_parts(addresses(parts), others, found, stream, RmsFields(weight, 1e-5, False))
    came = min(-(-n_rows // n_ranks), MAX_PROGRAMS)
    assert flags[last - 1][last].tolist() == [PAST + 2] * came + [PAST] * (MAX_PROGRAMS - came)
    check_close(stream, expected)
    check_close(found, normed, n_roundings=4)


@pytest.mark.parametrize("adds_one", [False, True])
def test_sums_that_are_added_and_normed(adds_one: bool) -> None:
    n_rows, size = 7, 48
    parts = [normal(n_rows, size, dtype=torch.float16) for _ in range(2)]
    residual, weight = normal(n_rows, size, dtype=torch.float16), normal(size, dtype=torch.float16)
    expected = residual.float() + (parts[0].float() + parts[1].float()).half().float()
    normed = expected * (expected.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * (weight.float() + adds_one)
    found = poisoned(n_rows, size, dtype=torch.float16)
    others, _ = meeting(1, 2)
    sum_parts(addresses(parts), others, found, residual, RmsFields(weight, 1e-5, adds_one))
    check_close(residual, expected)
    check_close(found, normed, n_roundings=4)


def test_a_wait_ends_when_the_host_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":  # the interpreter looks at flags 1,000 times in a second
        monkeypatch.setattr(rank_sums, "_POLLS", triton.language.constexpr(64))
    parts = [normal(3, 48, dtype=torch.float16) for _ in range(2)]
    alone, flags = meeting(0, 2, has_others=False)
    alone.gives_up.fill_(1)
    sum_parts(addresses(parts), alone, torch.empty_like(parts[0]))
    assert flags[1][0, :4].tolist() == [PAST + 1] * 3 + [PAST]


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_broadcasts(rank: int) -> None:
    inboxes = [integers([index] * 1500) for index in range(2)]
    values = integers(range(100 * rank, 100 * rank + 1500))
    others, _ = meeting(rank, 2)
    broadcast(values, addresses(inboxes), others)
    assert inboxes[1].tolist() == ([1] * 1500 if rank else list(range(1500)))
    assert values.tolist() == ([1] * 1500 if rank else list(range(1500)))


@pytest.mark.parametrize(("vocab_size", "n_ranks"), [(5003, 2), (4096, 4)])
@pytest.mark.parametrize("n_rows", [1, 90])
def test_rank_0_gets_all_logits(n_rows: int, vocab_size: int, n_ranks: int) -> None:
    cuts = [Shard(rank, n_ranks).head(vocab_size) for rank in range(n_ranks)]
    size = cuts[0].size
    logits = normal(n_rows, vocab_size, dtype=torch.bfloat16)
    parts = [logits[:, first : first + size].contiguous() for cut in cuts for first, _ in cut.spans]
    out = poisoned(n_rows, vocab_size, dtype=torch.bfloat16)
    others, flags = meeting(0, n_ranks, n=2)
    gather_logits(addresses(parts), others, size, out)
    assert torch.equal(out, logits)
    came = min(n_rows * -(-size // 2048), MAX_PROGRAMS)
    assert flags[1][0].tolist() == [PAST + 2] * came + [PAST] * (MAX_PROGRAMS - came)
    other, _ = meeting(1, n_ranks, n=2)
    gather_logits(addresses(parts), other, size, out.fill_(7))
    assert (out == 7).all()


class Ranks:
    """What a divided head asks of its collectives, of ranks that compute one after another."""

    def __init__(self, n_ranks: int) -> None:
        self.rank = 0
        self.size = n_ranks
        self.parts: list[Tensor] = []

    def logits_part(self, n_rows: int, size: int) -> Tensor:
        self.parts.append(poisoned(n_rows, size, dtype=torch.float16))
        return self.parts[-1]

    def gather_logits(self, size: int, out: Tensor) -> None:
        """Does nothing: parts are kept."""


@pytest.mark.parametrize(("vocab_size", "n_ranks"), [(256, 2), (200, 2), (100, 4)])
@pytest.mark.parametrize("is_tied", [True, False])
def test_parts_of_a_head_are_those_of_the_whole(vocab_size: int, n_ranks: int, is_tied: bool) -> None:
    """Also where the vocabulary has no equal parts. Weights on a GPU are loaded after the head is built."""
    weight, x = torch.zeros(vocab_size, 48, dtype=torch.float16, device=DEVICE), normal(3, 48, dtype=torch.float16)
    ranks = Ranks(n_ranks)
    heads = []
    for rank in range(n_ranks):
        ranks.rank = rank
        given = weight if is_tied else Shard(rank, n_ranks).head(vocab_size).of(weight)
        heads.append(DividedHead(ranks, lambda part: Linear(part.weight, None), vocab_size, LinearWeights(given)))
    weight.copy_(normal(vocab_size, 48, dtype=torch.float16))
    whole = x.float() @ weight.float().t()
    for rank, head in enumerate(heads):
        out = torch.empty(3, vocab_size, dtype=torch.float16, device=DEVICE)
        assert head(x, out) is out
        cut = Shard(rank, n_ranks).head(vocab_size)
        ((first, size),) = cut.spans
        check_close(ranks.parts[rank], whole[:, first : first + size])


def test_exchanges_are_numbered_from_0_in_each_store() -> None:
    """One process has done seven exchanges before, another none."""
    shared = torch.distributed.HashStore()
    old, new = RenumberedStore(shared), RenumberedStore(shared)
    for number in range(3):
        old.set(f"CUDASymmetricMemory/{7 + number}/0", b"old %d" % number)
        new.set(f"CUDASymmetricMemory/{number}/1", b"new %d" % number)
        new.wait([f"CUDASymmetricMemory/{number}/0"])
        assert new.get(f"CUDASymmetricMemory/{number}/0") == b"old %d" % number
        assert old.get(f"CUDASymmetricMemory/{7 + number}/1") == b"new %d" % number
