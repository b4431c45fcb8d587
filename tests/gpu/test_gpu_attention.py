"""Attention on the GPU against float32 torch: ragged batches, all variants and kernels, graphs, many plans."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from gpu_support import needs_flashinfer

pytestmark = needs_flashinfer

if torch.cuda.is_available():
    from attention_world import World, assert_close, ints

    from radixkv.runtime.device.attention.cuda.base import AttentionShape, DecodeRows
    from radixkv.runtime.device.attention.cuda.run_selection import SharingCosts
    from radixkv.runtime.step.plan import SharedRun

LLAMA = (32, 8, 128)
KV_DTYPES = [torch.bfloat16, torch.float8_e4m3fn]
PREFILL_KERNELS = [*product(KV_DTYPES, ["fa2", "triton", None])]
"""None is FA3 on Hopper."""


def shape_of(
    heads: tuple[int, int, int] = LLAMA, page_size: int = 16, kv_dtype: torch.dtype = torch.bfloat16
) -> AttentionShape:
    skip_without(kv_dtype)
    return AttentionShape(*heads, page_size, torch.bfloat16, heads[2] ** -0.5, kv_dtype)


def skip_without(kv_dtype: torch.dtype) -> None:
    if kv_dtype.itemsize == 1 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU cannot convert 8-bit floats")


@pytest.mark.parametrize("variant", ["whole", "split", None])
@pytest.mark.parametrize("page_size", [1, 16, 32, 64])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_decode_of_ragged_rows(kv_dtype, page_size, variant):
    world = World(
        shape_of(page_size=page_size, kv_dtype=kv_dtype), width=4096 // page_size, n_pages=65536 // page_size
    )
    lengths = ints([1, 15, 16, 17, 64, 65, 127, 128, 129, 700, 2048, 4000, 333, 31])
    batch_slots = ints(world.random.permutation(64)[: len(lengths)])
    for batch_slot, length in zip(batch_slots, lengths, strict=True):
        world.fill(int(batch_slot), int(length))
    q = world.queries(len(batch_slots))
    expected = world.expected(batch_slots, lengths, np.ones_like(batch_slots), q)
    assert_close(world.decode(batch_slots, lengths, q, variant=variant), expected)


@pytest.mark.parametrize("heads", [(8, 8, 128), (12, 4, 128), (28, 4, 128), (32, 2, 128), (40, 1, 128)])
def test_decode_with_other_head_ratios(heads):
    world = World(shape_of(heads))
    lengths = ints([1, 100, 1000, 17])
    for batch_slot, length in enumerate(lengths):
        world.fill(batch_slot, int(length))
    batch_slots, q = ints(range(4)), world.queries(4)
    expected = world.expected(batch_slots, lengths, np.ones_like(batch_slots), q)
    for variant in ("whole", "split"):
        assert_close(world.decode(batch_slots, lengths, q, variant=variant), expected)


@pytest.mark.parametrize(("kv_dtype", "kernel"), PREFILL_KERNELS)
@pytest.mark.parametrize("heads", [LLAMA, (28, 4, 128)])
@pytest.mark.parametrize("page_size", [1, 16])
def test_prompts_of_ragged_rows(kv_dtype, page_size, heads, kernel):
    world = World(
        shape_of(heads, page_size, kv_dtype),
        width=4096 // page_size,
        n_pages=32768 // page_size,
        prefill_kernel=kernel,
    )
    starts = ints([0, 0, 5, 512, 1536, 2000, 0])
    n_tokens = ints([1, 300, 129, 128, 96, 33, 777])
    batch_slots = ints([3, 9, 1, 30, 63, 0, 5])
    for batch_slot, start, n in zip(batch_slots, starts, n_tokens, strict=True):
        world.fill(int(batch_slot), int(start + n))
    q = world.queries(int(n_tokens.sum()))
    out = torch.full_like(q, math.nan)
    prompts = world.attention.plan_prompts(batch_slots, starts, n_tokens)
    world.attention.step(None, prompts).run(0, q, world.k, world.v, out)
    world.assert_close(out, world.expected(batch_slots, starts + n_tokens, n_tokens, world.as_read(q)))


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("heads", [(8, 2, 64), LLAMA, (8, 4, 256)])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_prompts_with_queries_of_8_bits(has_sinks, heads, page_size):
    """FA3 over K and V of 8 bits. The oracle rounds the queries too; what it cannot round are softmax weights."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("FA3 is Hopper's alone")
    world = World(
        shape_of(heads, page_size, torch.float8_e4m3fn),
        width=4096 // page_size,
        n_pages=32768 // page_size,
        prefill_kernel="fa3",
        has_sinks=has_sinks,
    )
    starts, n_tokens = ints([0, 0, 512, 1536, 2000]), ints([1, 300, 128, 96, 33])
    batch_slots = ints([3, 9, 30, 63, 0])
    for batch_slot, start, n in zip(batch_slots, starts, n_tokens, strict=True):
        world.fill(int(batch_slot), int(start + n))
    q = world.queries(int(n_tokens.sum()))
    expected = world.expected(batch_slots, starts + n_tokens, n_tokens, world.as_read(q))
    out = torch.full_like(q, math.nan)
    prompts = world.attention.plan_prompts(batch_slots, starts, n_tokens)
    world.attention.step(None, prompts).run(0, q, world.k, world.v, out)
    world.assert_close(out, expected)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("window", [200, 1000])
@pytest.mark.parametrize("heads", [(8, 2, 64), LLAMA, (8, 4, 256)])
def test_the_kernel_of_choice_computes_prompts_that_are_longer_than_windows(heads, window, kv_dtype):
    """FA3 of FlashInfer 0.6.12 never ended with K and V of 8 bits (flashinfer-ai/flashinfer#3578).

    Pages behind the window are not finite, as if others had them.
    """
    world = World(shape_of(heads, kv_dtype=kv_dtype), [window], width=256, n_pages=4096)
    starts, n_tokens, batch_slots = ints([0, 0, 1536, 2000]), ints([1, 1500, 700, 33]), ints([3, 9, 30, 63])
    for batch_slot, start, n in zip(batch_slots, starts, n_tokens, strict=True):
        world.fill(int(batch_slot), int(start + n))
    q = world.queries(int(n_tokens.sum()))
    expected = world.expected(batch_slots, starts + n_tokens, n_tokens, world.as_read(q))
    for batch_slot, start in zip(batch_slots, starts, strict=True):
        world.poison(int(batch_slot), max(int(start) + 1 - window, 0) // 16)
    out = torch.full_like(q, math.nan)
    prompts = world.attention.plan_prompts(batch_slots, starts, n_tokens)
    world.attention.step(None, prompts).run(0, q, world.k, world.v, out)
    world.assert_close(out, expected)


@pytest.mark.parametrize(
    ("heads", "dtype", "scale"),
    [
        ((8, 2, 64), torch.bfloat16, 64**-0.5),
        ((8, 4, 256), torch.bfloat16, 256**-0.5),
        (LLAMA, torch.float16, 128**-0.5),
        (LLAMA, torch.bfloat16, 0.05),
    ],
)
@pytest.mark.parametrize(("has_8_bits", "kernel"), [*product([False, True], ["fa2", "triton"])])
def test_other_head_sizes_dtypes_and_scales(has_8_bits, kernel, heads, dtype, scale):
    kv_dtype = torch.float8_e4m3fn if has_8_bits else dtype
    skip_without(kv_dtype)
    world = World(
        AttentionShape(*heads, 16, dtype, scale, kv_dtype),
        width=256,
        prefill_kernel=kernel,
        shared_kernel="fa2" if kernel == "fa2" else None,
    )
    batch_slots, lengths, n_tokens = ints([4, 2, 60, 7]), ints([900, 33, 400, 2500]), ints([1, 1, 400, 100])
    for batch_slot, length in zip(batch_slots, lengths, strict=True):
        world.fill(int(batch_slot), int(length))
    q = world.queries(502)
    expected = world.expected(batch_slots, lengths, n_tokens, q)
    out = torch.full_like(q, math.nan)
    prompts = world.attention.plan_prompts(batch_slots[2:], (lengths - n_tokens)[2:], n_tokens[2:])
    for variant in ("whole", "split"):
        staged = world.staging.stage()
        decode = world.attention.plan_decode(staged, DecodeRows(batch_slots[:2], lengths[:2]), variant=variant)
        world.staging.send(staged)
        world.attention.step(decode, prompts).run(0, q, world.k, world.v, out)
        assert_close(out, expected)


def test_shared_pages_without_flashinfer():
    """The decode kernel reads pages that many rows share where FlashInfer's large tiles would."""
    world = World(shape_of(), width=256, prefill_kernel="triton", costs=SharingCosts(launches_ns=0))
    pages = world.fill(0, 1600)[:100]
    lengths = ints(world.random.integers(1601, 2000, 64))
    for batch_slot, length in enumerate(lengths):
        world.fill(batch_slot, int(length), pages)
    batch_slots, q = ints(range(64)), world.queries(64)
    expected = world.expected(batch_slots, lengths, np.ones_like(batch_slots), q)
    shared = [SharedRun(tuple(range(64)), 0, 100)]
    staged = world.staging.stage()
    step = world.attention.plan_decode(staged, DecodeRows(batch_slots, lengths, shared))
    assert (step.variant, step.n_large_items) == ("shared", 0)
    assert_close(world.decode(batch_slots, lengths, q, shared), expected)


def check_mixed_steps(world, batch_slots, lengths, n_tokens, q, expected):
    """Checks both layers of steps with four decode rows before prompts, in each variant of decode."""
    prompts = world.attention.plan_prompts(batch_slots[4:], (lengths - n_tokens)[4:], n_tokens[4:])
    for variant in ("whole", "split"):
        staged = world.staging.stage()
        decode = world.attention.plan_decode(staged, DecodeRows(batch_slots[:4], lengths[:4]), variant=variant)
        world.staging.send(staged)
        for layer in (0, 1):
            out = torch.full_like(q, math.nan)
            world.attention.step(decode, prompts).run(layer, q, world.k, world.v, out)
            world.assert_close(out, expected[layer], 4)


@pytest.mark.parametrize(("kv_dtype", "kernel"), PREFILL_KERNELS)
def test_layers_with_a_window(kv_dtype, kernel):
    world = World(shape_of(kv_dtype=kv_dtype), [None, 500], width=256, n_pages=8192, prefill_kernel=kernel)
    batch_slots, lengths, n_tokens = (
        ints([4, 2, 60, 7, 9, 11]),
        ints([900, 33, 3000, 500, 501, 2500]),
        ints([1] * 6),
    )
    n_tokens[4:] = 300, 777
    for batch_slot, length in zip(batch_slots, lengths, strict=True):
        world.fill(int(batch_slot), int(length))
    q = world.queries(int(n_tokens.sum()))
    read = world.as_read(q, 4)
    expected = [world.expected(batch_slots, lengths, n_tokens, read, layer=layer) for layer in (0, 1)]
    check_mixed_steps(world, batch_slots, lengths, n_tokens, q, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("has_8_bits", "kernel"), [*product([False, True], ["fa2", "triton", None])])
def test_layers_with_sinks(has_8_bits, kernel, dtype):
    """The heads and windows of GPT-OSS, in mixed steps."""
    kv_dtype = torch.float8_e4m3fn if has_8_bits else dtype
    skip_without(kv_dtype)
    shape = AttentionShape(64, 8, 64, 16, dtype, 64**-0.5, kv_dtype)
    world = World(shape, [128, None], width=256, n_pages=8192, prefill_kernel=kernel, has_sinks=True)
    batch_slots, lengths = ints([4, 2, 60, 7, 9, 11, 30]), ints([900, 1, 3000, 127, 501, 2500, 1])
    n_tokens = ints([1, 1, 1, 1, 300, 777, 1])
    for batch_slot, length in zip(batch_slots, lengths, strict=True):
        world.fill(int(batch_slot), int(length))
    q = world.queries(int(n_tokens.sum()))
    read = world.as_read(q, 4)
    expected = [world.expected(batch_slots, lengths, n_tokens, read, layer=layer) for layer in (0, 1)]
    check_mixed_steps(world, batch_slots, lengths, n_tokens, q, expected)


@pytest.mark.parametrize(("kv_dtype", "kernel"), PREFILL_KERNELS)
@pytest.mark.parametrize("page_size", [1, 16])
def test_pages_behind_the_longest_window_are_not_read(kv_dtype, kernel, page_size):
    """Other requests may have them, and their KV need not be finite."""
    windows = [500, 200]
    world = World(
        shape_of(page_size=page_size, kv_dtype=kv_dtype),
        windows,
        width=4096 // page_size,
        n_pages=32768 // page_size,
        prefill_kernel=kernel,
    )
    batch_slots, lengths = ints([4, 2, 60, 7, 9, 11, 3]), ints([900, 33, 3000, 500, 501, 2500, 1216])
    n_tokens = ints([1, 1, 1, 1, 300, 777, 1])
    for batch_slot, length in zip(batch_slots, lengths, strict=True):
        world.fill(int(batch_slot), int(length))
    q = world.queries(int(n_tokens.sum()))
    read = world.as_read(q, 4)
    expected = [world.expected(batch_slots, lengths, n_tokens, read, layer=layer) for layer in (0, 1)]
    n_behind = np.maximum(lengths - n_tokens + 1 - max(windows), 0) // page_size
    assert (n_behind > 0).sum() == 4
    for batch_slot, n in zip(batch_slots, n_behind, strict=True):
        world.poison(int(batch_slot), int(n))
    check_mixed_steps(world, batch_slots, lengths, n_tokens, q, expected)


def test_a_mixed_step():
    world = World(shape_of(), width=256)
    batch_slots, lengths, n_tokens = ints([4, 2, 60, 7]), ints([900, 33, 400, 2500]), ints([1, 1, 400, 100])
    for batch_slot, length in zip(batch_slots, lengths, strict=True):
        world.fill(int(batch_slot), int(length))
    q = world.queries(502)
    staged = world.staging.stage()
    decode = world.attention.plan_decode(staged, DecodeRows(batch_slots[:2], lengths[:2]))
    world.staging.send(staged)
    prompts = world.attention.plan_prompts(batch_slots[2:], (lengths - n_tokens)[2:], n_tokens[2:])
    out = torch.full_like(q, math.nan)
    world.attention.step(decode, prompts).run(0, q, world.k, world.v, out)
    assert_close(out, world.expected(batch_slots, lengths, n_tokens, q))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(
    ("heads", "page_size", "has_sinks"),
    [((32, 8, 128), 16, False), ((28, 4, 128), 1, False), ((64, 8, 64), 64, True), ((16, 8, 256), 16, False)],
)
@pytest.mark.parametrize("shares", [False, True])
def test_a_token_and_its_drafts(shares, heads, page_size, has_sinks, kv_dtype):
    """Rows of 1 to 33 tokens in one step, with and without pages that others share, in layers of two windows."""
    skip_without(kv_dtype)
    shape = AttentionShape(*heads, page_size, torch.bfloat16, heads[2] ** -0.5, kv_dtype)
    world = World(
        shape,
        (None, 128),
        max_rows=128,
        width=4096 // page_size,
        n_pages=40_000 // page_size,
        costs=SharingCosts(launches_ns=0, large_ns=0),
        has_sinks=has_sinks,
    )
    counts, ends = ints([1, 5, 16, 17, 33, 2, 1, 8]), [900, 1500, 40, 3000, 2100, 1024, 7, 1800]
    n_shared = 512
    readers = [1, 3, 4, 7] if shares else []
    pages: list[int] = []
    for batch_slot, end in enumerate(ends):
        found = world.fill(batch_slot, end, pages if batch_slot in readers else ())
        if batch_slot in readers:
            pages = found[: n_shared // page_size]
    runs = [SharedRun(tuple(readers), 0, n_shared // page_size)] if shares else []
    of_row = np.repeat(np.arange(len(counts)), counts)
    batch_slots = ints(of_row)
    lengths = ints([ends[row] - int(counts[row]) + 1 + n for row in range(len(counts)) for n in range(counts[row])])
    q = world.queries(len(of_row))
    for layer in (0, 1):
        out = world.decode(batch_slots, lengths, q, runs, layer=layer, counts=counts)
        assert_close(out, world.expected(ints(range(len(counts))), ints(ends), counts, q, layer=layer))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_graph_gives_what_eager_does_as_lengths_change(kv_dtype):
    world = World(shape_of(kv_dtype=kv_dtype), width=256, max_rows=16, n_pages=8192)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for batch_slot in range(16):
            world.fill(batch_slot, 4096)
        q = world.queries(8)
        outs, graphs = {}, {}
        for variant in world.attention.variants(8):
            staged = world.staging.stage()
            step = world.attention.plan_decode(staged, DecodeRows(ints([]), ints([])), 8, variant)
            world.staging.send(staged)
            outs[variant] = torch.zeros_like(q)

            def body(step=step, out=outs[variant]):
                world.attention.step(step, None).run(0, q, world.k, world.v, out)

            body()
            stream.synchronize()
            graphs[variant] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[variant], stream=stream):
                body()
        for n_rows, longest in [(8, 4096), (5, 3000), (1, 17), (7, 1), (6, 200)]:
            batch_slots = ints(world.random.permutation(16)[:n_rows])
            lengths = ints(world.random.integers(1, longest + 1, n_rows))
            expected = world.expected(batch_slots, lengths, np.ones_like(batch_slots), q[:n_rows])
            for variant, graph in graphs.items():
                staged = world.staging.stage()
                step = world.attention.plan_decode(staged, DecodeRows(batch_slots, lengths), 8, variant)
                world.staging.send(staged)
                outs[variant].fill_(math.nan)
                graph.replay()
                assert step.variant == variant
                assert_close(outs[variant][:n_rows], expected)
                assert torch.isfinite(outs[variant]).all(), "rows of padding are finite as well"


def test_a_thousand_plans_without_waiting():
    world = World(shape_of(), width=128, max_rows=32)
    for batch_slot in range(32):
        world.fill(batch_slot, 2000)
    q = world.queries(32)
    torch.cuda.synchronize()
    checks = []
    for index in range(1000):
        n_rows = int(world.random.integers(1, 33))
        batch_slots = ints(world.random.permutation(32)[:n_rows])
        lengths = ints(world.random.integers(1, 2001, n_rows))
        out = world.decode(batch_slots, lengths, q[:n_rows])
        if index % 5 == 0:
            n_tokens = np.minimum(lengths, ints(world.random.integers(1, 40, n_rows)))
            rows = world.queries(int(n_tokens.sum()))
            prompts = world.attention.plan_prompts(batch_slots, lengths - n_tokens, n_tokens)
            prompt_out = torch.empty_like(rows)
            world.attention.step(None, prompts).run(0, rows, world.k, world.v, prompt_out)
            checks.append((batch_slots, lengths, n_tokens, rows, prompt_out))
        checks.append((batch_slots, lengths, np.ones_like(batch_slots), q[:n_rows], out))
    for batch_slots, lengths, n_tokens, rows, out in checks[::7]:
        assert_close(out, world.expected(batch_slots, lengths, n_tokens, rows))
