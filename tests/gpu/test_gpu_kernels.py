"""Norm, activation, argmax and rotary kernels, against torch in float32."""

from __future__ import annotations

import pytest
import torch
from kernel_support import DEVICE, RELATIVE, check_close, integers, normal, on_kernels, poisoned
from torch import Tensor

from radixkv.runtime.device.ops.base import RmsFields, TokenInputs
from radixkv.runtime.device.ops.cuda.activation import silu_and_multiply
from radixkv.runtime.device.ops.cuda.argmax import argmax, argmax_scratch
from radixkv.runtime.device.ops.cuda.logit_cap import cap_logits
from radixkv.runtime.device.ops.cuda.norm import rms_norm
from radixkv.runtime.device.ops.cuda.output_gate import multiply_by_sigmoid
from radixkv.runtime.device.ops.cuda.rotary import RotateAndStore

pytestmark = on_kernels
DTYPES = list(RELATIVE)
EPS = 1e-5


def normed(x: Tensor, weight: Tensor, *, adds_one: bool = False) -> Tensor:
    """Computes RMS norm as Transformers does: rounded to the weight's dtype before it, unless it adds one."""
    full = x.float()
    scaled = full * torch.rsqrt(full.square().mean(-1, keepdim=True) + EPS)
    return scaled * (1.0 + weight.float()) if adds_one else scaled.to(weight.dtype).float() * weight.float()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n_rows", "size"), [(1, 4096), (7, 4096), (3, 1000), (2, 64), (5, 5120), (1, 16384)])
def test_rms_norm(n_rows: int, size: int, dtype: torch.dtype) -> None:
    x, weight = normal(n_rows, size, dtype=dtype, scale=3), normal(size, dtype=dtype)
    out = poisoned(n_rows, size, dtype=dtype)
    rms_norm(x, RmsFields(weight, EPS), out)
    check_close(out, normed(x, weight), n_roundings=2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_with_weights_in_float32_round_once(dtype: torch.dtype) -> None:
    x, weight = normal(5, 1000, dtype=dtype, scale=3), normal(1000, dtype=torch.float32)
    out = poisoned(5, 1000, dtype=dtype)
    rms_norm(x, RmsFields(weight, EPS), out)
    check_close(out, normed(x, weight))


def test_rms_norm_of_strided_rows_in_place() -> None:
    wide, weight = normal(6, 3000, dtype=torch.bfloat16), normal(1000, dtype=torch.bfloat16)
    x, before = wide[:, 1000:2000], wide.clone()
    rms_norm(x, RmsFields(weight, EPS), x)
    check_close(x, normed(before[:, 1000:2000], weight), n_roundings=2)
    assert torch.equal(wide[:, :1000], before[:, :1000])
    assert torch.equal(wide[:, 2000:], before[:, 2000:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n_rows", "size"), [(1, 4096), (9, 2048), (3, 1000)])
def test_add_rms_norm(n_rows: int, size: int, dtype: torch.dtype) -> None:
    x, residual, weight = (normal(*shape, dtype=dtype) for shape in ((n_rows, size), (n_rows, size), (size,)))
    out, total = poisoned(n_rows, size, dtype=dtype), x + residual
    rms_norm(x, RmsFields(weight, EPS), out, residual)
    check_close(residual, total)
    check_close(out, normed(total, weight), n_roundings=2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_one_plus_the_weight_in_place(dtype: torch.dtype) -> None:
    x, residual, weight = (normal(*shape, dtype=dtype) for shape in ((5, 1000), (5, 1000), (1000,)))
    expected, total = normed(x, weight, adds_one=True), x + residual
    out = x.clone()
    norm = RmsFields(weight, EPS, adds_one=True)
    rms_norm(out, norm, out)
    check_close(out, expected)
    rms_norm(x, norm, x, residual)
    check_close(residual, total)
    check_close(x, normed(total, weight, adds_one=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n_rows", "size"), [(1, 14336), (5, 2048), (3, 1001), (2, 24)])
def test_silu_and_multiply(n_rows: int, size: int, dtype: torch.dtype) -> None:
    gate_up, out = normal(n_rows, 2 * size, dtype=dtype, scale=4), poisoned(n_rows, size, dtype=dtype)
    gate_up[0, 0], gate_up[0, 1] = -300.0, 300.0
    silu_and_multiply(gate_up, out)
    gate, up = gate_up.double().chunk(2, -1)
    check_close(out, torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n_rows", "vocab_size"), [(1, 128_256), (3, 50_257), (4, 100), (2, 4097), (40, 33_000)])
def test_argmax(n_rows: int, vocab_size: int, dtype: torch.dtype) -> None:
    logits = normal(n_rows, vocab_size, dtype=dtype, scale=3)
    check_argmax(logits, logits.float().argmax(-1).tolist(), [1] * n_rows)


def test_argmax_takes_the_first_of_equals() -> None:
    logits = torch.full((6, 9000), -5.0, device=DEVICE, dtype=torch.bfloat16)
    logits[0, [4100, 4096, 8999]] = 2.0
    logits[1, [3, 8000]] = 2.0
    logits[2] = 0.0
    logits[2, :5000] = -0.0
    logits[3] = -3e38
    logits[4, 8999] = -4.5
    logits[5, 17] = 3e38
    check_argmax(logits, [4096, 3, 0, 0, 8999, 17], [1] * 6)


def test_argmax_takes_the_first_of_equals_of_many_rows() -> None:
    logits = torch.full((40, 20_000), -5.0, device=DEVICE, dtype=torch.bfloat16)
    for row in range(40):
        logits[row, [100 * row + 7, 4096 + row, 19_999]] = float(row - 20)
    check_argmax(logits, [min(100 * row + 7, 4096 + row) if row > 15 else 0 for row in range(40)], [1] * 40)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_argmax_reports_rows_that_are_not_finite(bad: float) -> None:
    logits = normal(4, 9001, dtype=torch.bfloat16)
    logits[0, 0] = logits[2, 9000] = bad
    logits[1, 77], logits[3, 5000] = 50.0, 50.0
    check_argmax(logits, [0, 77, 0, 5000], [0, 1, 0, 1])
    logits[3] = bad
    check_argmax(logits, [0, 77, 0, 0], [0, 1, 0, 0])
    many = normal(50, 33_000, dtype=torch.bfloat16)
    ids = many.float().argmax(-1).tolist()
    many[17, 32_999], many[23, 16_000] = bad, bad
    ids[17] = ids[23] = 0
    check_argmax(many, ids, [int(row not in (17, 23)) for row in range(50)])


def test_argmax_of_strided_rows() -> None:
    wide = normal(8, 5000, dtype=torch.float32)
    logits = wide[::2, 100:4200]
    check_argmax(logits, logits.argmax(-1).tolist(), [1] * 4)


def test_argmax_stores_last_tokens_of_batch_slots() -> None:
    logits, last_tokens = normal(3, 500, dtype=torch.bfloat16), integers([-1] * 6)
    ids, finite = (poisoned(3, dtype=torch.int32) for _ in range(2))
    logits[1, 3] = float("nan")
    scratch = argmax_scratch(3, 500, logits.device)
    argmax(logits, ids, finite, scratch, batch_slots=integers([4, 0, 2]), last_tokens=last_tokens)
    best = logits.float().argmax(-1).tolist()
    assert last_tokens.tolist() == [0, -1, best[2], -1, best[0], -1]


def check_argmax(logits: Tensor, ids: list[int], finite: list[int]) -> None:
    n_rows, vocab_size = logits.shape
    ids_out, finite_out = (poisoned(n_rows, dtype=torch.int32) for _ in range(2))
    scratch = argmax_scratch(n_rows + 3, vocab_size, logits.device)
    argmax(logits, ids_out, finite_out, scratch)
    assert ids_out.tolist() == ids
    assert finite_out.tolist() == finite


@pytest.mark.parametrize(
    ("n_heads", "n_kv_heads", "head_dim"), [(32, 8, 128), (14, 2, 64), (28, 4, 128), (8, 8, 64), (16, 1, 256)]
)
@pytest.mark.parametrize("norms", [False, True])
def test_rotate_and_store(n_heads: int, n_kv_heads: int, head_dim: int, norms: bool) -> None:
    for dtype in DTYPES:
        check_rotation(5, n_heads, n_kv_heads, head_dim, norms, dtype)


def test_rotate_and_store_one_token() -> None:
    check_rotation(1, 32, 8, 128, False, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_head_norms_of_one_plus_the_weight(dtype: torch.dtype) -> None:
    check_rotation(5, 4, 1, 256, True, dtype, adds_one=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rotary_dim", "norms"), [(256, 64, True), (64, 24, False)])
def test_heads_that_are_rotated_in_part(head_dim: int, rotary_dim: int, norms: bool, dtype: torch.dtype) -> None:
    check_rotation(5, 6, 2, head_dim, norms, dtype, adds_one=True, rotary_dim=rotary_dim)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norms", [False, True])
def test_heads_that_are_not_rotated(norms: bool, dtype: torch.dtype) -> None:
    check_rotation(5, 6, 2, 64, norms, dtype, rotary_dim=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n_heads", "n_kv_heads", "head_dim"), [(16, 2, 512), (8, 1, 256)])
@pytest.mark.parametrize("has_values", [False, True])
def test_values_that_are_keys_and_values_with_a_norm(
    has_values: bool, n_heads: int, n_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    check_rotation(
        5, n_heads, n_kv_heads, head_dim, True, dtype, has_values=has_values, has_value_norm=True, in_float32=True
    )
    check_rotation(5, n_heads, n_kv_heads, head_dim, False, dtype, has_values=has_values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_that_read_the_keys_and_values_of_others(dtype: torch.dtype) -> None:
    """Only queries are rotated, and the pool stays as it is."""
    qkv, weight = normal(5, 8 * 512, dtype=dtype), normal(512, dtype=torch.float32)
    angles = 100 * torch.rand(100, 256, device=DEVICE)
    caches = [poisoned(5, 4, 2, 512, dtype=dtype) for _ in range(2)]
    positions, q_out = integers([3, 99, 0, 7, 20]), poisoned(5, 8, 512, dtype=dtype)
    rotate = RotateAndStore(torch.cat([angles.cos(), angles.sin()], -1), weight, None, EPS, has_value_norm=True)
    rotate(qkv, TokenInputs(positions, positions, integers([4, 0, 1, 9, 8])), *caches, q_out)
    q = normed(qkv.unflatten(1, (8, 512)), weight).to(dtype)
    check_close(q_out, rotated(q, angles[positions.long()]), slack=4.0)
    assert all(cache.isnan().all() for cache in caches)


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_with_a_limit(dtype: torch.dtype) -> None:
    logits = normal(3, 9001, dtype=dtype, scale=30)
    logits[0, 0], logits[0, 1], logits[1, 9000], logits[2, 5] = 3e38, -3e38, float("nan"), 0.0
    before = logits.clone()
    cap_logits(logits, 30.0)
    expected = 30.0 * (before.double() / 30.0).tanh()
    assert logits[1, 9000].isnan()
    logits[1, 9000], expected[1, 9000] = 0.0, 0.0
    check_close(logits, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_gates", [1, 1500])
def test_gates_of_outputs(n_gates: int, dtype: torch.dtype) -> None:
    x, gate, sums = normal(5, 1500, dtype=dtype), normal(5, n_gates, dtype=dtype), normal(5, 1500, dtype=dtype)
    out = poisoned(5, 1500, dtype=dtype)
    multiply_by_sigmoid(x, gate, out)
    expected = x.double() * gate.double().sigmoid()
    check_close(out, expected)
    total = sums.clone()
    multiply_by_sigmoid(x, gate, total, adds=True)
    check_close(total, sums.double() + expected)
    multiply_by_sigmoid(x, gate, x)
    assert torch.equal(x, out)


def check_rotation(
    n_tokens: int,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    norms: bool,
    dtype: torch.dtype,
    *,
    adds_one: bool = False,
    rotary_dim: int | None = None,
    has_values: bool = True,
    has_value_norm: bool = False,
    in_float32: bool = False,
) -> None:
    """Checks strided rows; one token in three has no slot, and other slots of the pool stay unwritten."""
    n_slots, width = 4 * n_tokens, (n_heads + (1 + has_values) * n_kv_heads) * head_dim
    qkv = normal(n_tokens, width + 32, dtype=dtype)[:, :width]
    kind = torch.float32 if in_float32 else dtype
    weights = [normal(head_dim, dtype=kind) if norms else None for _ in range(2)]
    positions = torch.randint(100, (n_tokens,), device=DEVICE, dtype=torch.int32)
    slot_mapping = torch.randperm(n_slots, device=DEVICE)[:n_tokens].int()
    slot_mapping[1::3] = -1
    angles = 100 * torch.rand(100, (head_dim if rotary_dim is None else rotary_dim) // 2, device=DEVICE)
    k_cache, v_cache = (poisoned(n_slots // 4, 4, n_kv_heads, head_dim, dtype=dtype) for _ in range(2))
    q_out = poisoned(n_tokens, n_heads, head_dim, dtype=dtype)
    rotate_and_store = RotateAndStore(
        None if rotary_dim == 0 else torch.cat([angles.cos(), angles.sin()], -1),
        *weights,
        EPS,
        adds_one,
        has_values=has_values,
        has_value_norm=has_value_norm,
    )
    rotate_and_store(qkv, TokenInputs(positions, positions, slot_mapping), k_cache, v_cache, q_out)
    heads = qkv.unflatten(1, (-1, head_dim))
    q, k = heads[:, :n_heads], heads[:, n_heads : n_heads + n_kv_heads]
    v = heads[:, -n_kv_heads:]
    if has_value_norm:
        v = normed(v, torch.ones(head_dim, device=DEVICE)).to(dtype)
    if weights[0] is not None and weights[1] is not None:
        q, k = (normed(x, weight, adds_one=adds_one).to(dtype) for x, weight in ((q, weights[0]), (k, weights[1])))
    slack = 4.0 if norms else 0.1
    check_close(q_out, rotated(q, angles[positions.long()]), slack=slack)
    written = slot_mapping >= 0
    k_slots, v_slots = k_cache.view(n_slots, n_kv_heads, head_dim), v_cache.view(n_slots, n_kv_heads, head_dim)
    targets = slot_mapping[written].long()
    check_close(k_slots[targets], rotated(k, angles[positions.long()])[written], slack=slack)
    if has_value_norm:
        check_close(v_slots[targets], v[written], slack=slack)
    else:
        assert torch.equal(v_slots[targets], v[written])
    others = torch.ones(n_slots, dtype=torch.bool, device=DEVICE).index_fill_(0, targets, False)
    assert k_slots[others].isnan().all()
    assert v_slots[others].isnan().all()


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    n_rotated = 2 * angles.shape[-1]
    if n_rotated < x.shape[-1]:
        return torch.cat([rotated(x[..., :n_rotated], angles), x[..., n_rotated:].float()], -1)
    first, second = x.float().chunk(2, -1)
    cosine, sine = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


def test_rotary_positions_are_integers_of_rows() -> None:
    """Position 0 rotates nothing: the output equals the input."""
    qkv = normal(2, 3 * 64, dtype=torch.bfloat16)
    k_cache, v_cache = (poisoned(2, 1, 1, 64, dtype=torch.bfloat16) for _ in range(2))
    q_out = poisoned(2, 1, 64, dtype=torch.bfloat16)
    table = torch.cat([torch.ones(1, 32), torch.zeros(1, 32)], -1).to(DEVICE)
    inputs = TokenInputs(*map(integers, ([0, 0], [0, 0], [1, 0])))
    RotateAndStore(table, None, None, EPS)(qkv, inputs, k_cache, v_cache, q_out)
    assert torch.equal(q_out[:, 0], qkv[:, :64])
    assert torch.equal(k_cache[:, 0, 0].flip(0), qkv[:, 64:128])
    assert torch.equal(v_cache[:, 0, 0].flip(0), qkv[:, 128:])
