"""Kernels over 4-bit weights against torch in float64."""

from __future__ import annotations

import pytest
import torch
from kernel_support import DEVICE, normal, on_device_only, on_kernels, poisoned
from torch import Tensor

from radixkv.runtime.device.ops.base import as_tensor
from radixkv.runtime.device.ops.cuda.int4_linear import MAX_ROWS, dequantize_int4, int4_linear, int4_tile
from radixkv.runtime.device.ops.cuda.int4_product import Int4Tile, multiply_int4
from radixkv.runtime.device.ops.cuda.layers import Int4Linear, Mlp
from radixkv.runtime.device.weights.int4_matrix import Int4Groups, Int4Matrix

pytestmark = on_kernels
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter's products have no bfloat16


def matrix(n_out: int, n_in: int, group_size: int | None) -> Int4Matrix:
    """Returns a random matrix whose channels and groups differ in size, with all values and zero points."""
    made = Int4Matrix.allocate((n_out, n_in), Int4Groups(group_size), torch.device(DEVICE))
    values = torch.randint(16, (n_out, n_in), device=DEVICE, dtype=torch.uint8)
    zeros = torch.randint(17, (n_out, len(made.scales)), device=DEVICE)
    scales = 10 ** (torch.rand(n_out, len(made.scales), device=DEVICE) * 3 - 4)
    made.store(values, scales, zeros)
    return made


def check_product(out: Tensor, x: Tensor, weight: Int4Matrix, *, precision: float = 2.0**-16) -> None:
    """Checks a product within the rounding of sums, relative to the sizes of its terms."""
    dense = weight.dequantize().double()
    exact = x.double() @ dense.t()
    sizes = x.double().abs() @ dense.abs().t()
    assert torch.isfinite(out).all()
    rounding = torch.finfo(out.dtype).eps * exact.abs() if out.dtype != torch.float32 else 0
    assert ((out.double() - exact).abs() <= precision * sizes + rounding).all()


@on_device_only
@pytest.mark.parametrize("group_size", [32, 64, 96, 128, 256, None])
@pytest.mark.parametrize("n_rows", [1, 3, 16, 17, 70])
@pytest.mark.parametrize(("n_out", "n_in"), [(192, 512), (72, 200), (130, 384)])
def test_products(n_rows: int, n_out: int, n_in: int, group_size: int | None) -> None:
    weight, x = matrix(n_out, n_in, group_size), normal(n_rows, n_in, dtype=DTYPE)
    out, again = (poisoned(n_rows, n_out, dtype=torch.float32) for _ in range(2))
    tile = int4_tile(n_rows, weight)
    multiply_int4(x, weight, out, tile)
    multiply_int4(x, weight, again, tile)
    check_product(out, x, weight)
    assert torch.equal(out, again)


@on_device_only
@pytest.mark.parametrize("tile", [Int4Tile(16, 8, 4, 4), Int4Tile(32, 16, 16, 1), Int4Tile(64, 8, 2, 1)])
def test_products_in_other_tiles(tile: Int4Tile) -> None:
    weight, x = matrix(150, 640, 128), normal(40, 640, dtype=DTYPE)
    out = poisoned(40, 150, dtype=torch.float32)
    multiply_int4(x, weight, out, tile)
    check_product(out, x, weight)


@pytest.mark.parametrize("group_size", [32, 128, None])
@pytest.mark.parametrize(("n_out", "n_in"), [(48, 256), (19, 200)])
def test_matrices_are_dequantized(n_out: int, n_in: int, group_size: int | None) -> None:
    weight, out = matrix(n_out, n_in, group_size), poisoned(n_out, n_in, dtype=DTYPE)
    dequantize_int4(weight, out)
    assert torch.equal(out, weight.dequantize().to(DTYPE))


@pytest.mark.parametrize("dense_bytes", [1, 128 * 200 * 2, 1 << 20])
@pytest.mark.parametrize("group_size", [32, 96, None])
def test_products_in_parts_of_16_bits(group_size: int | None, dense_bytes: int) -> None:
    weight, x = matrix(300, 200, group_size), normal(MAX_ROWS + 1, 200, dtype=DTYPE)
    out = poisoned(len(x), 300, dtype=DTYPE)
    int4_linear(x, weight, out, dense_bytes=dense_bytes)
    check_product(out, x, weight, precision=2 * float(torch.finfo(DTYPE).eps))


@on_device_only
def test_a_row_does_not_depend_on_those_after_it() -> None:
    weight, x = matrix(64, 256, 128), normal(5, 256, dtype=DTYPE)
    x[3:] = float("nan")
    out = poisoned(5, 64, dtype=torch.float32)
    multiply_int4(x, weight, out, int4_tile(5, weight))
    check_product(out[:3], x[:3], weight)


@on_device_only
@pytest.mark.parametrize("n_rows", [1, 7, 20, 50, 70])
@pytest.mark.parametrize(("inner", "n_in"), [(256, 512), (100, 200), (14_336, 256), (64, 8704)])
def test_gated_products(inner: int, n_in: int, n_rows: int) -> None:
    weight, x = matrix(2 * inner, n_in, 64), normal(n_rows, n_in, dtype=DTYPE)
    linear = Int4Linear(weight, None)
    out = as_tensor(linear.gated(x, linear))
    gate, up = (x.double() @ weight.dequantize().double().t()).chunk(2, -1)
    exact = torch.nn.functional.silu(gate) * up
    assert float((out.double() - exact).norm() / exact.norm()) < 0.01


@on_device_only
def test_an_mlp_with_biases() -> None:
    n_rows, hidden, inner = 5, 128, 256
    gate_up, down = matrix(2 * inner, hidden, 128), matrix(hidden, inner, 64)
    up_bias, down_bias = normal(2 * inner, dtype=DTYPE), normal(hidden, dtype=DTYPE)
    x = normal(n_rows, hidden, dtype=DTYPE)
    product = x.double() @ gate_up.dequantize().double().t() + up_bias
    gate, up = product.chunk(2, -1)
    exact = (torch.nn.functional.silu(gate) * up) @ down.dequantize().double().t() + down_bias
    found = Mlp(Int4Linear(gate_up, up_bias), Int4Linear(down, down_bias), "silu")(x)
    assert float((found.double() - exact).norm() / exact.norm()) < 0.01


@on_device_only
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group_size", [32, 128, None])
@pytest.mark.parametrize("n_rows", [1, 8, 9, 16, 17, 32, 33, 64, 65, 200, 1000])
@pytest.mark.parametrize(("n_out", "n_in"), [(6144, 4096), (28_672, 1024), (1024, 14_336)])
def test_products_of_model_size(
    n_out: int, n_in: int, n_rows: int, group_size: int | None, dtype: torch.dtype
) -> None:
    weight, x = matrix(n_out, n_in, group_size), normal(n_rows, n_in, dtype=dtype)
    out, again = (poisoned(n_rows, n_out, dtype=dtype) for _ in range(2))
    int4_linear(x, weight, out)
    int4_linear(x, weight, again)
    assert torch.equal(out, again)
    # Above MAX_ROWS weights are rounded to the dtype.
    check_product(out, x, weight, precision=2.0**-14 if n_rows <= MAX_ROWS else float(torch.finfo(dtype).eps))
