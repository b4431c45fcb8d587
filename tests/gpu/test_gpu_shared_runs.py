"""Attention that reads shared pages once for many rows equals attention row by row."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gpu_support import needs_flashinfer

from radixkv.runtime.step.plan import SharedRun

pytestmark = needs_flashinfer

if torch.cuda.is_available():
    from attention_world import World, assert_close, assert_close_in_8_bits, ints

    from radixkv.runtime.device.attention.cuda.base import AttentionShape, DecodeRows
    from radixkv.runtime.device.attention.cuda.run_selection import SharingCosts


def nested_world(
    page_size=16,
    n_groups=8,
    group_rows=6,
    root=2048,
    branch=512,
    kernel="fa2",
    heads=(32, 8, 128),
    kv_dtype=torch.bfloat16,
    has_sinks=False,
):
    """Returns shuffled rows that all share ``root`` tokens, in large tiles, and in groups ``branch`` more."""
    if kernel == "fa3" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("FA3 is Hopper's alone")
    if kv_dtype.itemsize == 1 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU cannot convert 8-bit floats")
    n_rows = n_groups * group_rows
    world = World(
        AttentionShape(*heads, page_size, torch.bfloat16, heads[2] ** -0.5, kv_dtype),
        max_rows=n_rows,
        width=4096 // page_size,
        n_pages=131072 // page_size,
        shared_kernel=kernel,
        costs=SharingCosts(launches_ns=0, large_ns=0),
        has_sinks=has_sinks,
    )
    rows = world.random.permutation(n_rows)
    lengths = np.empty(n_rows, np.int32)
    trunk: list[int] = []
    runs = [SharedRun(tuple(range(n_rows)), 0, root // page_size)]
    for group in range(n_groups):
        members = sorted(rows[group * group_rows : (group + 1) * group_rows].tolist())
        shared: list[int] = []
        for row in members:
            lengths[row] = root + branch + int(world.random.integers(1, 300))
            pages = world.fill(row, int(lengths[row]), shared or trunk)
            trunk = trunk or pages[: root // page_size]
            shared = shared or pages[: (root + branch) // page_size]
        runs.append(SharedRun(tuple(members), root // page_size, branch // page_size))
    return world, ints(range(n_rows)), lengths, runs


@pytest.mark.parametrize("kernel", ["fa2", "fa3"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("n_groups", "group_rows"), [(12, 4), (2, 32), (1, 40), (5, 9)])
def test_nested_runs_equal_flat(page_size, n_groups, group_rows, kernel):
    world, batch_slots, lengths, runs = nested_world(page_size, n_groups, group_rows, kernel=kernel)
    q = world.queries(len(batch_slots))
    staged = world.staging.stage()
    step = world.attention.plan_decode(staged, DecodeRows(batch_slots, lengths, runs))
    assert step.variant == "shared"
    assert step.n_large_items > 0
    shared = world.decode(batch_slots, lengths, q, runs)
    assert_close(shared, world.expected(batch_slots, lengths, np.ones_like(batch_slots), q))
    assert_close(shared, world.decode(batch_slots, lengths, q, variant="split").float())


@pytest.mark.parametrize("kernel", ["fa2", "fa3"])
@pytest.mark.parametrize(("page_size", "heads"), [(1, (32, 8, 128)), (16, (28, 4, 128)), (64, (8, 2, 64))])
def test_nested_runs_of_8_bits(page_size, heads, kernel):
    """FA3 rounds queries and softmax weights over shared pages to 8 bits; the rows' own pages are read in 16."""
    world, batch_slots, lengths, runs = nested_world(
        page_size, 2, 32, kernel=kernel, heads=heads, kv_dtype=torch.float8_e4m3fn
    )
    q = world.queries(len(batch_slots)).to(torch.float8_e4m3fn).to(torch.bfloat16)
    staged = world.staging.stage()
    step = world.attention.plan_decode(staged, DecodeRows(batch_slots, lengths, runs))
    assert step.n_large_items > 0
    check = assert_close if kernel == "fa2" else assert_close_in_8_bits
    check(
        world.decode(batch_slots, lengths, q, runs),
        world.expected(batch_slots, lengths, np.ones_like(batch_slots), q),
    )


@pytest.mark.parametrize("heads", [(28, 4, 128), (8, 8, 128), (8, 2, 64)])
def test_nested_runs_equal_flat_with_other_heads(heads):
    world, batch_slots, lengths, runs = nested_world(n_groups=2, group_rows=32, kernel="fa3", heads=heads)
    q = world.queries(len(batch_slots))
    staged = world.staging.stage()
    step = world.attention.plan_decode(staged, DecodeRows(batch_slots, lengths, runs))
    assert step.n_large_items > 0
    assert_close(
        world.decode(batch_slots, lengths, q, runs),
        world.expected(batch_slots, lengths, np.ones_like(batch_slots), q),
    )


@pytest.mark.parametrize("kernel", ["fa2", "fa3"])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_nested_runs_with_sinks(kv_dtype, kernel):
    """The heads of GPT-OSS: each row's sinks are added once, after all its results."""
    world, batch_slots, lengths, runs = nested_world(
        n_groups=2, group_rows=32, kernel=kernel, heads=(64, 8, 64), kv_dtype=kv_dtype, has_sinks=True
    )
    q = world.queries(len(batch_slots)).to(kv_dtype).to(torch.bfloat16)
    staged = world.staging.stage()
    step = world.attention.plan_decode(staged, DecodeRows(batch_slots, lengths, runs))
    assert step.n_large_items > 0
    check = assert_close_in_8_bits if kernel == "fa3" and kv_dtype.itemsize == 1 else assert_close
    check(
        world.decode(batch_slots, lengths, q, runs),
        world.expected(batch_slots, lengths, np.ones_like(batch_slots), q),
    )


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("kernel", ["fa2", "fa3"])
def test_a_shared_graph_serves_other_runs(kernel, has_sinks):
    world, batch_slots, lengths, runs = nested_world(kernel=kernel, has_sinks=has_sinks)
    n_rows = len(batch_slots)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        q = world.queries(n_rows)
        out = torch.zeros_like(q)
        staged = world.staging.stage()
        step = world.attention.plan_decode(staged, DecodeRows(ints([]), ints([])), n_rows, "shared")
        world.staging.send(staged)
        world.attention.step(step, None).run(0, q, world.k, world.v, out)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            world.attention.step(step, None).run(0, q, world.k, world.v, out)
        expected = world.expected(batch_slots, lengths, np.ones_like(batch_slots), q)
        for graph_runs in (runs, runs[:1], runs[:4], []):
            staged = world.staging.stage()
            variant = None if graph_runs else "shared"
            step = world.attention.plan_decode(
                staged, DecodeRows(batch_slots, lengths, graph_runs), n_rows, variant
            )
            assert step.variant == "shared"
            world.staging.send(staged)
            out.fill_(math.nan)
            graph.replay()
            assert_close(out, expected)
