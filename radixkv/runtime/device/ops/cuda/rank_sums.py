"""Kernels of several GPUs: sums of parts of a product, alone or added and normed; logits; a broadcast."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixkv.runtime.device.ops.base import RmsFields, Rows
from radixkv.runtime.device.ops.cuda.cached_kernel import CachedKernel
from radixkv.runtime.device.ops.cuda.fp8_rows import keeps_unrounded, output_of, scale_group, store_row
from radixkv.runtime.device.ops.cuda.norm import normed_row
from radixkv.runtime.device.ops.cuda.programmatic_launch import overlapping, power_of_two, warps_for

MAX_PROGRAMS = 128
"""Most programs of a kernel. Each meets the program of its number on the other ranks, so all must run at once."""
_POLLS = tl.constexpr(1 << 17)
"""After this many looks at a flag, some 50 ms, a program looks whether it should give up.

That is in the host's memory, and takes some 0.4 ms where all programs look at once. Where one rank did so while
another came, it was late for the next sum, and the other rank looked there: ranks went on like this for many steps.
"""
_MIN_SPARED_BYTES = 1 << 20
"""Where a sum in two shots moves at least so many bytes less to each GPU, it is chosen: they take 3 µs over NVLink,
about as long as the second meeting."""
_BROADCAST_BLOCK = 1024
_LOGITS_BLOCK = 2048


@dataclass(frozen=True)
class Meeting:
    """Where programs of one number meet, each on another rank: each writes its count of meetings to all others."""

    rank: int
    flags: Tensor
    """[ranks] int64: addresses of each rank's flags, [ranks, MAX_PROGRAMS] int32, at first 0."""
    counts: Tensor
    """[MAX_PROGRAMS] int32, at first 0: past meetings of each program of this rank."""
    gives_up: Tensor
    """[1] int32 in pinned memory of the host: once it is not 0 programs no longer wait, for undefined results."""

    @property
    def n_ranks(self) -> int:
        """Number of ranks."""
        return len(self.flags)


def sum_parts(
    parts: Tensor,
    meeting: Meeting,
    out: Rows,
    residual: Tensor | None = None,
    norm: RmsFields | None = None,
) -> None:
    """Sums the ranks' parts of a product, in float32 and in the order of ranks: each rank gets the same bits.

    With a residual stream and a norm it computes ``residual += sum`` and norms that, with the bits of ``rms_norm``.

    In one shot each rank reads the parts of all. In two shots it sums some rows, and reads the sums of other rows
    from the ranks that have them: 2 (ranks - 1) / ranks times the bytes of a part in place of ranks - 1 times. With
    two ranks these are equal.

    A rank may write its next part to the same memory only after another meeting, which is that of the sum between:
    products alternate between two memories.

    Args:
        parts: [ranks] int64: addresses of each rank's part, [rows, hidden] of the dtype of ``residual``, or of
            ``out`` without one; aligned to 16 bytes. Undefined afterwards.
        meeting: of the ranks.
        out: [rows, hidden]; a contiguous tensor without a norm.
        residual: [rows, hidden], contiguous; with a norm only.
        norm: of the sum; see ``rms_norm``.
    """
    if residual is None:
        assert isinstance(out, Tensor), "only norms write FP8"
        like = out
    else:
        like = residual
    n_rows, size = like.shape
    block = power_of_two(size)
    has_two_shots = spared_bytes(n_rows * size * like.itemsize, meeting.n_ranks) >= _MIN_SPARED_BYTES
    n_programs = triton.cdiv(n_rows, meeting.n_ranks) if has_two_shots else n_rows
    _sum_parts[(min(n_programs, MAX_PROGRAMS),)](
        like,
        like if norm is None else norm.weight,
        0.0 if norm is None else norm.eps,
        *output_of(out),
        parts,
        meeting.flags,
        meeting.counts,
        meeting.gives_up,
        meeting.rank,
        n_rows,
        GROUP=scale_group(out, block),
        KEEPS=keeps_unrounded(out),
        SIZE=size,
        BLOCK=block,
        N_RANKS=meeting.n_ranks,
        STRIDE=MAX_PROGRAMS,
        TWO_SHOTS=has_two_shots,
        NORMS=norm is not None,
        ADDS_ONE=norm is not None and norm.adds_one,
        num_warps=warps_for(block),
        **overlapping(like),
    )


def spared_bytes(part_bytes: int, n_ranks: int) -> int:
    """Returns how many bytes less a GPU reads from others for a sum in two shots than in one."""
    return part_bytes * (n_ranks - 1) * (n_ranks - 2) // n_ranks


def gather_logits(parts: Tensor, meeting: Meeting, size: int, out: Tensor) -> None:
    """Joins the ranks' parts of logits on rank 0. Parts may change afterwards.

    Args:
        parts: [ranks] int64: addresses of each rank's part, [rows, size] of the dtype of ``out``.
        meeting: of the ranks.
        size: tokens of a part. Where these are more than the vocabulary, the last parts begin before the end of
            those before them, and have the same logits there.
        out: [rows, vocab], contiguous, written on rank 0 alone.
    """
    n_rows, vocab_size = out.shape
    n_blocks = triton.cdiv(size, _LOGITS_BLOCK)
    _gather_logits[(min(n_rows * n_blocks, MAX_PROGRAMS),)](
        out,
        parts,
        meeting.flags,
        meeting.counts,
        meeting.gives_up,
        meeting.rank,
        n_rows,
        vocab_size,
        size,
        BLOCK=_LOGITS_BLOCK,
        DIVIDES=size * meeting.n_ranks == vocab_size,
        N_RANKS=meeting.n_ranks,
        STRIDE=MAX_PROGRAMS,
        num_warps=4,
        **overlapping(out),
    )


def broadcast(values: Tensor, inboxes: Tensor, meeting: Meeting) -> None:
    """Replaces ``values`` by rank 0's.

    Args:
        values: [n] int32, contiguous.
        inboxes: [ranks] int64: addresses of memory of the size of ``values`` that each rank keeps for this.
        meeting: of the ranks.
    """
    _broadcast[(1,)](
        values,
        inboxes,
        meeting.flags,
        meeting.counts,
        meeting.gives_up,
        meeting.rank,
        len(values),
        BLOCK=_BROADCAST_BLOCK,
        N_RANKS=meeting.n_ranks,
        STRIDE=MAX_PROGRAMS,
        num_warps=4,
        **overlapping(values),
    )


@CachedKernel
@triton.jit(do_not_specialize=["group_stride", "rank", "n_rows"])
def _sum_parts(
    residual: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    scales: tl.tensor,
    group_stride: tl.tensor,
    unrounded: tl.tensor,
    parts: tl.tensor,
    flags: tl.tensor,
    counts: tl.tensor,
    gives_up: tl.tensor,
    rank: tl.tensor,
    n_rows: tl.tensor,
    GROUP: tl.constexpr,
    KEEPS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    N_RANKS: tl.constexpr,
    STRIDE: tl.constexpr,
    TWO_SHOTS: tl.constexpr,
    NORMS: tl.constexpr,
    ADDS_ONE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    columns = tl.arange(0, BLOCK)
    is_column = columns < SIZE
    if NORMS:
        scale = tl.load(weight + columns, is_column, 0.0)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    _meet(flags, counts, gives_up, rank, N_RANKS, STRIDE)
    dtype = residual.dtype.element_ty
    # Rows have 64 bits, because offsets do.
    first, step, end = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64), n_rows.to(tl.int64)
    if TWO_SHOTS:  # ranks take turns with the rows of a program; no other rank reads what is overwritten here
        own = tl.multiple_of(tl.load(parts + rank).to(tl.pointer_type(dtype)), 16)
        for row in range(first + rank * step, end, step * N_RANKS):
            offsets = row * SIZE + columns
            tl.store(own + offsets, _sum_of_row(parts, offsets, is_column, dtype, BLOCK, N_RANKS), is_column)
        _meet(flags, counts, gives_up, rank, N_RANKS, STRIDE)
    for row in range(first, end, step):
        offsets = row * SIZE + columns
        if TWO_SHOTS:
            sums = tl.load(parts + row // step % N_RANKS).to(tl.pointer_type(dtype))
            value = tl.load(tl.multiple_of(sums, 16) + offsets, is_column, 0.0)
        else:
            value = _sum_of_row(parts, offsets, is_column, dtype, BLOCK, N_RANKS)
        if NORMS:
            target = residual + offsets
            value = (value.to(tl.float32) + tl.load(target, is_column, 0.0).to(tl.float32)).to(dtype)
            tl.store(target, value, is_column)
            value = normed_row(value, scale, eps, SIZE, ADDS_ONE)
        store_row(value, row, SIZE, out, out_stride, scales, group_stride, unrounded, BLOCK, GROUP, KEEPS)


@triton.jit
def _sum_of_row(
    parts: tl.tensor,
    offsets: tl.tensor,
    is_column: tl.tensor,
    dtype: tl.constexpr,
    BLOCK: tl.constexpr,
    N_RANKS: tl.constexpr,
) -> tl.tensor:
    total = tl.zeros([BLOCK], tl.float32)
    for other in tl.static_range(N_RANKS):
        part = tl.multiple_of(tl.load(parts + other).to(tl.pointer_type(dtype)), 16)
        total += tl.load(part + offsets, is_column, 0.0).to(tl.float32)
    return total.to(dtype)


@CachedKernel
@triton.jit(do_not_specialize=["rank", "n_rows"])
def _gather_logits(
    out: tl.tensor,
    parts: tl.tensor,
    flags: tl.tensor,
    counts: tl.tensor,
    gives_up: tl.tensor,
    rank: tl.tensor,
    n_rows: tl.tensor,
    vocab_size: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
    DIVIDES: tl.constexpr,
    N_RANKS: tl.constexpr,
    STRIDE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    _meet(flags, counts, gives_up, rank, N_RANKS, STRIDE)
    if rank == 0:
        n_blocks = tl.cdiv(size, BLOCK)
        for block in range(tl.program_id(0), n_rows * n_blocks, tl.num_programs(0)):
            row = (block // n_blocks).to(tl.int64)
            columns = block % n_blocks * BLOCK + tl.arange(0, BLOCK)
            for other in tl.static_range(N_RANKS):
                part = tl.multiple_of(tl.load(parts + other).to(tl.pointer_type(out.dtype.element_ty)), 16)
                first = other * size if DIVIDES else tl.minimum(other * size, vocab_size - size)
                logits = tl.load(part + row * size + columns, columns < size)
                tl.store(out + row * vocab_size + first + columns, logits, columns < size)
    _meet(flags, counts, gives_up, rank, N_RANKS, STRIDE)  # rank 0 has read what others will write next


@CachedKernel
@triton.jit(do_not_specialize=["rank", "size"])
def _broadcast(
    values: tl.tensor,
    inboxes: tl.tensor,
    flags: tl.tensor,
    counts: tl.tensor,
    gives_up: tl.tensor,
    rank: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
    N_RANKS: tl.constexpr,
    STRIDE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    if rank == 0:
        for other in range(1, N_RANKS):
            inbox = tl.load(inboxes + other).to(tl.pointer_type(tl.int32))
            for first in range(0, size, BLOCK):
                offsets = first + tl.arange(0, BLOCK)
                tl.store(inbox + offsets, tl.load(values + offsets, offsets < size), offsets < size)
    _meet(flags, counts, gives_up, rank, N_RANKS, STRIDE)
    if rank != 0:
        inbox = tl.load(inboxes + rank).to(tl.pointer_type(tl.int32))
        for first in range(0, size, BLOCK):
            offsets = first + tl.arange(0, BLOCK)
            tl.store(values + offsets, tl.load(inbox + offsets, offsets < size), offsets < size)


@triton.jit
def _meet(
    flags: tl.tensor,
    counts: tl.tensor,
    gives_up: tl.tensor,
    rank: tl.tensor,
    N_RANKS: tl.constexpr,
    STRIDE: tl.constexpr,
) -> None:
    """Waits until the program of this number has come here on each rank. What they wrote before is visible then."""
    program = tl.program_id(0)
    count = tl.load(counts + program) + 1
    tl.debug_barrier()  # all threads' writes come before the flags, and all have read the count
    for step in tl.static_range(1, N_RANKS):
        theirs = tl.load(flags + (rank + step) % N_RANKS).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(theirs + rank * STRIDE + program, count, sem="release", scope="sys")
    mine = tl.load(flags + rank).to(tl.pointer_type(tl.int32)) + program
    for step in tl.static_range(1, N_RANKS):
        flag = mine + (rank + step) % N_RANKS * STRIDE
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        n_polls = 1
        while seen - count < 0:  # the difference, because counts overflow after days
            seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
            n_polls += 1
            if n_polls % _POLLS == 0:  # noqa: SIM102 (with "and" each round would read the host's memory)
                if tl.load(gives_up, volatile=True) != 0:
                    seen = count
    tl.store(counts + program, count)
    tl.debug_barrier()
