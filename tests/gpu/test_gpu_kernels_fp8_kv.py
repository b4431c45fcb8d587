"""The kernels that write and read K and V of 8 bits, against torch in float32."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_support import DEVICE, among_layers, check_close, integers, normal, on_device_only, on_kernels, poisoned
from torch import Tensor

from radixkv.runtime.device.attention.cuda.base import LayerTensors
from radixkv.runtime.device.attention.cuda.decode_kernel import attend_decode
from radixkv.runtime.device.attention.cuda.decode_tiles import TileConfig
from radixkv.runtime.device.attention.cuda.merge import PartialResults, merge_results
from radixkv.runtime.device.attention.cuda.query_order import copy_item_queries
from radixkv.runtime.device.kv_dtype import FP8, FP8_MAX, LayerScales, quantize
from radixkv.runtime.device.ops.base import TokenInputs
from radixkv.runtime.device.ops.cuda.fp8 import round_to_fp8
from radixkv.runtime.device.ops.cuda.rotary import RotateAndStore

pytestmark = [
    *on_kernels,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
        reason="needs instructions that convert to 8-bit floats",
    ),
]

SCALES = LayerScales(0.25, 2.0)
HUGE = 1e4
"""Beyond what e4m3 holds."""


def empty_pool(*shape: int) -> Tensor:
    return torch.full(shape, math.nan, device=DEVICE).to(FP8)


def same_bytes(found: Tensor, expected: Tensor) -> bool:
    """Whether values are the same to the bit, NaN included."""
    return torch.equal(found.view(torch.uint8) & 0x7F, expected.view(torch.uint8) & 0x7F) and torch.equal(
        found.float().nan_to_num(), expected.float().nan_to_num()
    )


def representable(*shape: int, dtype: torch.dtype) -> Tensor:
    """Returns random values that 8 bits hold exactly: the interpreter does not round to the nearest."""
    mantissa, exponent = torch.randint(8, 16, shape), torch.randint(-4, 4, shape)
    sign = 2 * torch.randint(2, shape) - 1
    return (sign * mantissa * 2.0**exponent).to(dtype).to(DEVICE)


@on_device_only
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_is_to_nearest_saturates_and_keeps_what_is_not_finite(dtype: torch.dtype) -> None:
    limits = [0.0, 447.0, FP8_MAX, 464.0, 465.0, 6e4, 2**-9, 2**-10, 2**-11, math.inf, math.nan]
    x = (
        torch.cat([torch.tensor(limits + [-limit for limit in limits]), 40 * torch.randn(5000)])
        .to(dtype)
        .to(DEVICE)
    )
    out = empty_pool(len(x))
    round_to_fp8(x, out)
    assert same_bytes(out, quantize(x, 1.0))
    assert out.float()[5] == FP8_MAX
    assert out.float()[9:11].isnan().all(), "infinity would be hidden"


def test_rounding_of_what_8_bits_hold() -> None:
    x = representable(5000, dtype=torch.bfloat16)
    x[17], x[4711] = HUGE, -HUGE
    out = empty_pool(len(x))
    round_to_fp8(x, out)
    assert same_bytes(out, quantize(x, 1.0))


@pytest.mark.parametrize(
    ("is_exact", "has_norms"),
    [(True, False), *(pytest.param(False, has_norms, marks=on_device_only) for has_norms in (False, True))],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rotation_stores_what_16_bits_round_to(dtype: torch.dtype, is_exact: bool, has_norms: bool) -> None:
    """The oracle is the kernel's own output in 16 bits, which other tests check, divided and rounded in torch.

    With ``is_exact`` angles are quarter turns, and nothing but what is too large is rounded.
    """
    n_tokens, n_heads, n_kv_heads, head_dim, n_slots = 7, 6, 2, 64, 28
    width, half = (n_heads + 2 * n_kv_heads) * head_dim, head_dim // 2
    qkv = (representable if is_exact else normal)(n_tokens, width, dtype=dtype)
    qkv[2, -1], qkv[3, -1] = HUGE, -HUGE
    if not is_exact:
        qkv[0, -2] = math.inf
    norms = [normal(head_dim, dtype=dtype) for _ in range(2)] if has_norms else [None, None]
    angles = 100 * torch.rand(n_tokens, half)
    turns = torch.randint(4, (n_tokens, half))
    quarters = torch.tensor([1.0, 0.0, -1.0, 0.0])
    cosine, sine = (quarters[turns], quarters[turns - 1]) if is_exact else (angles.cos(), angles.sin())
    slot_mapping = torch.randperm(n_slots, device=DEVICE)[:n_tokens].int()
    slot_mapping[1] = -1
    pools = {}
    for kind in (dtype, FP8):
        shape = (n_slots // 4, 4, n_kv_heads, head_dim)
        k, v = (empty_pool(*shape) if kind == FP8 else poisoned(*shape, dtype=dtype) for _ in range(2))
        q_out = poisoned(n_tokens, n_heads, head_dim, dtype=dtype)
        positions = torch.arange(n_tokens, device=DEVICE, dtype=torch.int32)
        rotate_and_store = RotateAndStore(torch.cat([cosine, sine], -1).to(DEVICE), *norms, 1e-5, scales=SCALES)
        rotate_and_store(qkv, TokenInputs(positions, positions, slot_mapping), k, v, q_out)
        pools[kind] = k, v, q_out
    assert torch.equal(pools[dtype][2], pools[FP8][2])
    for index, scale in enumerate(SCALES):
        assert same_bytes(pools[FP8][index], quantize(pools[dtype][index], scale))


@pytest.mark.parametrize("kv_dtype", [FP8, torch.float16])
@pytest.mark.parametrize(
    "tile_config",
    [
        TileConfig(32, 2, 2, is_ahead=False, token_ns=1.0),
        TileConfig(32, 3, 2, is_ahead=True, token_ns=1.0),
        TileConfig(64, 3, 4, is_ahead=True, token_ns=1.0),
    ],
)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("has_other_layers", [False, True])
def test_decode_rows(has_other_layers: bool, head_dim: int, tile_config: TileConfig, kv_dtype: torch.dtype) -> None:
    """Rows of 1 to 100 tokens; the last is split into two items. Pages and positions of no row hold NaN.

    In float16, because the interpreter multiplies no bfloat16.
    """
    dtype = torch.float16
    n_kv_heads, group, page, lengths = 2, 3, 16, [1, 16, 45, 100]
    scales = SCALES if kv_dtype == FP8 else LayerScales()
    n_rows, width = len(lengths), 8
    free = torch.randperm(40)
    tables = integers(free[: n_rows * width].view(n_rows, width).tolist())
    pools = [normal(41, page, n_kv_heads, head_dim, dtype=dtype) for _ in range(2)]
    is_read = torch.zeros(41, page, dtype=torch.bool, device=DEVICE)
    for row, length in enumerate(lengths):
        for position in range(length):
            is_read[tables[row, position // page], position % page] = True
    for pool in pools:
        pool[~is_read] = math.nan
    k, v = (quantize(pool, scale) if kv_dtype == FP8 else pool for pool, scale in zip(pools, scales, strict=True))
    q = normal(n_rows, n_kv_heads * group, head_dim, dtype=dtype)
    columns = [
        (row, 1, row * width, begin, end, 0, result)
        for row, begin, end, result in [
            (3, 0, 64, 0),
            (3, 64, 100, 1),
            (0, 0, 1, -1),
            (1, 0, 16, -1),
            (2, 0, 45, -1),
        ]
    ] + [(0,) * 7]
    items = integers([list(column) for column in zip(*columns, strict=True)])
    if has_other_layers:
        k, v = among_layers(k), among_layers(v)
    out, values = (poisoned(4, n_kv_heads * group, head_dim, dtype=dtype) for _ in range(2))
    lse = poisoned(4, n_kv_heads * group, dtype=torch.float32)
    order, scale = integers([0, 1, 2, 3]), head_dim**-0.5
    layer, results = LayerTensors(q, k, v, out, scales, None), PartialResults(values, values, lse, (group, 1))
    attend_decode(
        layer, tables, items, order, results, scale=scale, n_items=len(columns), tile=16, tile_config=tile_config
    )
    merge_results(layer, results, integers([0, 0, 0, 0, 2]), integers([0, 1]), order)
    for row, length in enumerate(lengths):
        pages = tables[row].long()
        keys, vals = (
            (cache[pages].float() * factor).flatten(0, 1)[:length].repeat_interleave(group, 1)
            for cache, factor in zip((k, v), scales, strict=True)
        )
        weights = (torch.einsum("hd,thd->ht", q[row].float(), keys) * scale).softmax(-1)
        check_close(out[row], torch.einsum("ht,thd->hd", weights, vals), n_roundings=3, slack=1.0)


@pytest.mark.parametrize("kv_dtype", [FP8, torch.float16])
@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_queries_see_no_more_than_their_limits(has_sinks: bool, is_ahead: bool, kv_dtype: torch.dtype) -> None:
    """A token and its drafts: an item that writes their outputs, and three parts, the last unseen by most."""
    dtype, n_kv_heads, group, page, head_dim = torch.float16, 2, 3, 16, 64
    scales = SCALES if kv_dtype == FP8 else LayerScales()
    tables = integers(torch.randperm(20).view(2, 10).tolist())
    k, v = (normal(21, page, n_kv_heads, head_dim, dtype=dtype) for _ in range(2))
    if kv_dtype == FP8:
        k, v = (quantize(pool, scale) for pool, scale in zip((k, v), scales, strict=True))
    sinks = normal(n_kv_heads * group, dtype=torch.float32) if has_sinks else None
    lengths = [40, 41, 42, *range(126, 131)]
    q = normal(len(lengths), n_kv_heads * group, head_dim, dtype=dtype)
    columns = [(0, 3, 0, 0, 42, 40, -1)] + [
        (3, 5, 10, begin, end, 126, result) for begin, end, result in ((0, 64, 0), (64, 128, 5), (128, 130, 10))
    ]
    items = integers([list(column) for column in zip(*columns, strict=True)])
    out = poisoned(len(lengths), n_kv_heads * group, head_dim, dtype=dtype)
    values = poisoned(15, n_kv_heads * group, head_dim, dtype=dtype)
    lse = poisoned(15, n_kv_heads * group, dtype=torch.float32)
    order, scale = integers([*range(len(lengths))]), head_dim**-0.5
    layer = LayerTensors(q, k, v, out, scales, None if sinks is None else sinks * math.log2(math.e))
    results = PartialResults(values, values, lse, (group, 1))
    attend_decode(
        layer,
        tables,
        items,
        order,
        results,
        scale=scale,
        n_items=len(columns),
        tile=64,
        tile_config=TileConfig(32, 3, 2, is_ahead=is_ahead, token_ns=1.0),
        has_limits=True,
    )
    indices = [first + query for query in range(5) for first in (0, 5, 10)]
    merge_results(layer, results, integers([0, 0, 0, *range(0, 16, 3)]), integers(indices), order)
    for row, length in enumerate(lengths):
        pages = tables[int(row >= 3)].long()
        keys, vals = (
            (cache[pages].float() * factor).flatten(0, 1)[:length].repeat_interleave(group, 1)
            for cache, factor in zip((k, v), scales, strict=True)
        )
        scores = torch.einsum("hd,thd->ht", q[row].float(), keys) * scale
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None]], 1)
        weights = scores.softmax(-1)[:, :length]
        check_close(out[row], torch.einsum("ht,thd->hd", weights, vals), n_roundings=3, slack=1.0)


@pytest.mark.parametrize("group", [1, 4])
def test_queries_of_items_are_rounded(group: int) -> None:
    n_kv_heads, dim = 2, 64
    q = representable(6, n_kv_heads * group, dim, dtype=torch.bfloat16)
    out = empty_pool(5, group, n_kv_heads, dim)
    copy_item_queries(
        q, integers([3, 0, 5, 1, 2, 4]), integers([[1], [3], [1]]), out, n_items=1, n_rows=3, group=group
    )
    expected = q[[0, 5, 1]].view(3, n_kv_heads, group, dim).transpose(1, 2)
    assert same_bytes(out[1:4], quantize(expected, 1.0))
    assert out[[0, 4]].float().isnan().all()
