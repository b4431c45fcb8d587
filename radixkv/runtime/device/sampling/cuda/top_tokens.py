"""The likeliest tokens of a row, in order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from radixkv.runtime.device.ops.cuda.programmatic_launch import power_of_two
from radixkv.runtime.device.sampling.cuda.softmax_parts import GROUP, group_maxima, load_values


def list_largest(values: Tensor, rows: Tensor, counts: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Of each row the ``counts`` largest, largest first; of equals the smaller id first. Two launches.

    About a microsecond for each that is listed, all rows at once.

    Args:
        values: [any, vocab], any float dtype.
        rows: [n] int32, which rows to read.
        counts: [n] int32, at most ``width`` and the vocabulary.
        width: of the lists.

    Returns:
        ids and values, [n, width] int32 and float32; what is behind ``counts`` is undefined, and so are the values
        of a row that has NaN, whose ids are still inside the vocabulary.
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
    """Takes the largest off the groups' maxima, again and again: what was taken is behind the last one in order.

    Of equal groups the first is taken, and in it the first token, so that equals come by their ids.
    """
    row = tl.program_id(0).to(tl.int64)
    source = values + tl.load(rows + row).to(tl.int64) * stride
    groups = tl.arange(0, N_GROUPS)
    left = tl.load(maxima + row * n_groups + groups, groups < n_groups, float("-inf"))
    last = tl.max(left, 0)
    last_id = -1
    for place in range(tl.load(counts + row)):
        best = tl.max(left, 0)
        group = tl.min(tl.where(left == best, groups, n_groups - 1), 0)
        ids = group * SIZE + tl.arange(0, SIZE)
        found = load_values(source, ids, size)
        is_left = (found == best) & ((found < last) | (ids > last_id))
        last_id = tl.min(tl.where(is_left, ids, size - 1), 0)
        last = best
        rest = tl.where((found < best) | ((found == best) & (ids > last_id)), found, float("-inf"))
        left = tl.where(groups == group, tl.max(rest, 0), left)
        tl.store(ids_out + row * width + place, last_id)
        tl.store(values_out + row * width + place, best)
