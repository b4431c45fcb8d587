"""The kernel that lists the largest logits of each row in order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from radixkv.runtime.device.ops.cuda.programmatic_launch import power_of_two
from radixkv.runtime.device.sampling.cuda.softmax_parts import GROUP, group_maxima, load_values


def list_largest(values: Tensor, rows: Tensor, counts: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Lists the ``counts`` largest values of each row, largest first, and the smaller id first among equal ones.

    Two launches, which take about a microsecond per listed value for all rows together.

    Args:
        values: [any, vocab], any float dtype.
        rows: [n] int32, indices of the rows to read.
        counts: [n] int32, at most ``width`` and the vocabulary.
        width: length of the lists.

    Returns:
        ids and values, [n, width] int32 and float32. Entries after ``counts`` are undefined. So are the values of a
        row with NaN, whose ids are still inside the vocabulary.
    """
    size = values.shape[1]
    maxima = group_maxima(values, rows)
    ids = torch.empty(len(rows), width, dtype=torch.int32, device=values.device)
    largest = torch.empty(len(rows), width, dtype=torch.float32, device=values.device)
    _list_largest[(len(rows),)](
        values,
        rows,
        counts,
        maxima,
        ids,
        largest,
        values.stride(0),
        maxima.shape[1],
        width,
        size,
        N_GROUPS=power_of_two(maxima.shape[1]),
        SIZE=GROUP.value,
        num_warps=4,
    )
    return ids, largest


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["rows", "counts"])
def _list_largest(
    values: tl.tensor,
    rows: tl.tensor,
    counts: tl.tensor,
    maxima: tl.tensor,
    ids_out: tl.tensor,
    values_out: tl.tensor,
    stride: tl.tensor,
    n_groups: tl.tensor,
    width: tl.tensor,
    size: tl.tensor,
    N_GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Repeatedly takes the largest remaining value, using the groups' maxima; what was taken precedes it in order.

    Among equal groups it takes the first, and in it the first token, so that equal values are ordered by id.
    """
    row = tl.program_id(0).to(tl.int64)
    source = values + tl.load(rows + row).to(tl.int64) * stride
    groups = tl.arange(0, N_GROUPS)
    remaining = tl.load(maxima + row * n_groups + groups, groups < n_groups, float("-inf"))
    last = tl.max(remaining, 0)
    last_id = -1
    for index in range(tl.load(counts + row)):
        best = tl.max(remaining, 0)
        group = tl.min(tl.where(remaining == best, groups, n_groups - 1), 0)
        ids = group * SIZE + tl.arange(0, SIZE)
        group_values = load_values(source, ids, size)
        is_remaining = (group_values == best) & ((group_values < last) | (ids > last_id))
        last_id = tl.min(tl.where(is_remaining, ids, size - 1), 0)
        last = best
        rest = tl.where(
            (group_values < best) | ((group_values == best) & (ids > last_id)), group_values, float("-inf")
        )
        remaining = tl.where(groups == group, tl.max(rest, 0), remaining)
        tl.store(ids_out + row * width + index, last_id)
        tl.store(values_out + row * width + index, best)
