"""The kernels that merge partial results of attention and reorder queries, against torch."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_support import DEVICE, check_close, integers, normal, on_kernels, poisoned

from radixkv.runtime.device.attention.cuda.base import LayerTensors
from radixkv.runtime.device.attention.cuda.merge import PartialResults, merge_results
from radixkv.runtime.device.attention.cuda.query_order import copy_item_queries, gather_queries
from radixkv.runtime.device.kv_dtype import UNSCALED

pytestmark = on_kernels

KV_HEADS, DIM = 2, 64


@pytest.mark.parametrize("by_member", [False, True])
@pytest.mark.parametrize("is_few", [False, True])
@pytest.mark.parametrize(("n_queries", "group"), [(5, 2), (4, 7)])
def test_merge(n_queries: int, group: int, is_few: bool, by_member: bool) -> None:
    """Reordered queries with 0 to 19 results each; a result over no tokens has no weight."""
    n_heads = KV_HEADS * group
    counts = [(0, 2, 1, 19, 9)[query % 5] for query in range(n_queries)]
    ends = torch.tensor(counts).cumsum(0).tolist()
    listed = torch.randperm(ends[-1] + 4)[: ends[-1]]
    values = normal(ends[-1] + 4, n_heads, DIM, dtype=torch.float32)
    lse = normal(ends[-1] + 4, n_heads, dtype=torch.float32, scale=5.0)
    lse[listed[0]] = -math.inf
    order, out = torch.randperm(n_queries), poisoned(n_queries, n_heads, DIM, dtype=torch.float32)
    steps = (1, KV_HEADS) if by_member else (group, 1)
    cache = poisoned(1, 1, KV_HEADS, DIM, dtype=torch.float32)
    merge_results(
        LayerTensors(out, cache, cache, out, UNSCALED, None),
        PartialResults(values, values, lse, steps),
        integers([0, *ends]),
        integers(listed.tolist()),
        integers(order.tolist()),
        few_pairs=1 << 30 if is_few else 0,
    )
    stored = torch.tensor([head // group * steps[0] + head % group * steps[1] for head in range(n_heads)])
    for query, (count, end) in enumerate(zip(counts, ends, strict=True)):
        found = out[order[query]]
        if not count:
            assert found.isnan().all(), "written, though there is nothing to merge"
            continue
        results = listed[end - count : end].to(DEVICE)
        weights = torch.softmax(lse[results].double() * math.log(2), 0)[..., None]
        check_close(found, (values[results].double() * weights).sum(0)[stored.to(DEVICE)])


def test_gather_queries() -> None:
    x, order = normal(7, 6, DIM, dtype=torch.bfloat16), [3, 0, 6, 1]
    out = poisoned(4, 6, DIM, dtype=torch.bfloat16)
    gather_queries(x, integers(order), out)
    assert torch.equal(out, x[order])


@pytest.mark.parametrize("group", [1, 4, 7])
def test_copy_item_queries(group: int) -> None:
    """Copies overlapping items and a padding item; other elements of the output stay unwritten."""
    q = normal(6, KV_HEADS * group, DIM, dtype=torch.bfloat16)
    order, items = [3, 0, 5, 1, 2, 4], [(0, 2, 1), (1, 3, 4), (0, 0, 0)]
    out = poisoned(9, group, KV_HEADS, DIM, dtype=torch.bfloat16)
    copies = integers([list(column) for column in zip(*items, strict=True)])
    copy_item_queries(q, integers(order), copies, out, n_items=3, n_rows=3, group=group)
    written = set()
    for first, n_queries, result in items:
        for index in range(n_queries):
            heads = q[order[first + index]].view(KV_HEADS, group, DIM).transpose(0, 1)
            assert torch.equal(out[result + index], heads)
            written.add(result + index)
    assert all(out[result].isnan().all() for result in range(9) if result not in written)
