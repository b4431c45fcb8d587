"""Shared pages read once for many rows give what each row gets alone."""

from __future__ import annotations

import math

import numpy as np
import pytest

from radixkv.runtime.plan import SharedRun

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use"),
]
pytest.importorskip("flashinfer", reason="attention on CUDA is FlashInfer's")

if torch.cuda.is_available():
    from attention_world import World, assert_close, ints

    from radixkv.runtime.device.cuda.attention.kernels import Shape
    from radixkv.runtime.device.cuda.kernels.linear import linear


def nested_world(page_size=16, n_groups=8, group_rows=6, root=2048, branch=512):
    """Rows in a shuffled order: all share ``root`` tokens, groups of them ``branch`` more."""
    n_rows = n_groups * group_rows
    world = World(
        Shape(32, 8, 128, page_size, torch.bfloat16),
        max_rows=n_rows,
        width=4096 // page_size,
        n_pages=131072 // page_size,
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


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("n_groups", "group_rows"), [(12, 4), (2, 32), (1, 40), (5, 9)])
def test_nested_runs_equal_flat(page_size, n_groups, group_rows):
    world, slots, lengths, runs = nested_world(page_size, n_groups, group_rows)
    q = world.queries(len(slots))
    staged = world.staging.stage()
    assert world.attention.plan_decode(staged, slots, lengths, runs).variant == "shared"
    shared = world.decode(slots, lengths, q, runs)
    assert_close(shared, world.expected(slots, lengths, np.ones_like(slots), q))
    assert_close(shared, world.decode(slots, lengths, q, variant="split").float())


def test_a_shared_graph_serves_other_runs():
    world, slots, lengths, runs = nested_world()
    n_rows = len(slots)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        q = world.queries(n_rows)
        out = torch.zeros_like(q)
        staged = world.staging.stage()
        step = world.attention.plan_decode(staged, ints([]), ints([]), bucket=n_rows, variant="shared")
        world.staging.send(staged)
        world.attention.step(step, None).run(0, q, world.k, world.v, out)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            world.attention.step(step, None).run(0, q, world.k, world.v, out)
        expected = world.expected(slots, lengths, np.ones_like(slots), q)
        for some in (runs, runs[:1], runs[:4], []):
            staged = world.staging.stage()
            variant = None if some else "shared"
            step = world.attention.plan_decode(staged, slots, lengths, some, n_rows, variant)
            assert step.variant == "shared"
            world.staging.send(staged)
            out.fill_(math.nan)
            graph.replay()
            assert_close(out, expected)


def test_padding_lets_nothing_pass_the_queries():
    """A shared graph without shared runs: kernels that have nothing to do must keep the order of the others."""
    world, slots, lengths, _ = nested_world(n_groups=1, group_rows=4)
    n_rows, width = len(slots), world.shape.n_heads * world.shape.head_dim
    n_inputs = 1 << 16  # so that the product takes a while
    x = torch.randn(n_rows, n_inputs, dtype=torch.bfloat16, device="cuda") / 256
    weight = torch.randn(width, n_inputs, dtype=torch.bfloat16, device="cuda")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        q = torch.empty(n_rows, width, dtype=torch.bfloat16, device="cuda")
        heads = q.view(n_rows, world.shape.n_heads, world.shape.head_dim)
        out = torch.zeros_like(heads)
        staged = world.staging.stage()
        step = world.attention.plan_decode(staged, slots, lengths, (), n_rows, "shared")
        world.staging.send(staged)

        def work():
            linear(x, weight, q)
            world.attention.step(step, None).run(0, heads, world.k, world.v, out)

        work()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            work()
        expected = world.expected(slots, lengths, np.ones_like(slots), heads)
        for _ in range(20):
            q.fill_(math.nan)
            out.fill_(math.nan)
            graph.replay()
            assert_close(out, expected)
