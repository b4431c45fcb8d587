"""Kernels over FP8 weights against torch in float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from delta_net_world import Span, World, delta_net
from kernel_support import DEVICE, check_close, normal, on_device_only, on_kernels, poisoned
from torch import Tensor
from transformers import MixtralConfig

from radixkv.runtime.device.kv_dtype import FP8
from radixkv.runtime.device.model_config.config import DecoderConfig
from radixkv.runtime.device.ops import base
from radixkv.runtime.device.ops.base import Fp8Rows, RmsFields, Rows, RowScales, as_tensor, padded_rows
from radixkv.runtime.device.ops.cuda import layers, operations
from radixkv.runtime.device.ops.cuda.delta_net.layer import GatedDeltaNet
from radixkv.runtime.device.ops.cuda.expert_routing import route
from radixkv.runtime.device.ops.cuda.expert_sums import sum_experts
from radixkv.runtime.device.ops.cuda.fp8_linear import Fp8Tile, fp8_linear, multiply_fp8, weight_only_tile
from radixkv.runtime.device.ops.cuda.fp8_rows import new_rows, quantize_rows, row_scales, silu_and_multiply_to_fp8
from radixkv.runtime.device.ops.cuda.grouped_linear import grouped_linear, grouped_tiles
from radixkv.runtime.device.ops.cuda.layers import Fp8Linear, Linear, Mlp, RMSNorm
from radixkv.runtime.device.ops.cuda.norm import rms_norm
from radixkv.runtime.device.ops.cuda.operations import CudaOperations, Experts, SharedExpert
from radixkv.runtime.device.weights.fp8_matrix import BLOCK, Fp8Matrix, Fp8Scales
from radixkv.runtime.device.weights.layer_weights import ExpertsWeights, LinearWeights, MlpWeights, NormWeights

pytestmark = on_kernels
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter's products have no bfloat16
IMPRECISE = 2.0**-8 if DEVICE == "cuda" else 2.0**-10
"""Relative error of sums: the tensor cores of Hopper keep 13 bits of sums of FP8 products."""


def matrix(n_out: int, n_in: int, scales: Fp8Scales) -> Fp8Matrix:
    """Returns a random matrix whose channels differ in size by orders of magnitude."""
    sizes = 10 ** torch.linspace(-3, 1, n_out, device=DEVICE)[:, None]
    made = Fp8Matrix.allocate((n_out, n_in), scales=scales, device=torch.device(DEVICE))
    made.quantize(normal(n_out, n_in, dtype=torch.float32) * sizes)
    return made


def rounded(x: Tensor, kind: RowScales) -> Fp8Rows:
    """Returns what ``quantize_rows`` does, by torch: rows are rounded as a matrix whose channels they are."""
    made = Fp8Matrix.allocate(tuple(x.shape), scales="channels", device=x.device)
    if kind == "rows":
        made.quantize(x)
        return Fp8Rows(len(x), made.values, made.scales[:, None], x.dtype)
    scales = x.new_empty(-(-x.shape[1] // BLOCK), len(x), dtype=torch.float32).t()
    for index, part in enumerate(x.split(BLOCK, 1)):
        group = Fp8Matrix.allocate(tuple(part.shape), scales="channels", device=x.device)
        group.quantize(part)
        made.values[:, index * BLOCK : (index + 1) * BLOCK] = group.values
        scales[:, index] = group.scales
    return Fp8Rows(len(x), made.values, scales, x.dtype)


def dequantized(rows: Fp8Rows) -> Tensor:
    scales = rows.scales[: rows.n_rows].double()
    if scales.shape[1] > 1:
        scales = scales.repeat_interleave(BLOCK, 1)[:, : rows.values.shape[1]]
    return rows.values[: rows.n_rows].double() * scales


def check_product(out: Tensor, x: Tensor, weight: Fp8Matrix) -> None:
    """Checks a product within the rounding of sums, relative to the sizes of each channel."""
    exact = x @ weight.dequantize().double().t()
    sizes = (x.abs() @ weight.dequantize().double().abs().t()) * 0.1
    assert torch.isfinite(out).all()
    difference = (out.double() - exact).abs() / (sizes + exact.abs() + 1e-30)
    assert float(difference.max()) < 2 * IMPRECISE


@on_device_only  # Triton's interpreter loses a carry when it rounds to FP8
@pytest.mark.parametrize("scales", ["rows", "groups"])
@pytest.mark.parametrize(("n_rows", "size"), [(1, 4096), (5, 200), (3, 128), (2, 16)])
def test_rows_are_rounded_to_fp8(n_rows: int, size: int, scales: RowScales) -> None:
    x = normal(n_rows, size, dtype=DTYPE)
    x[0, 0], x[-1, -1] = 1000.0, 0.0
    if n_rows > 1:
        x[1] = 0
    rows = quantize_rows(x, scales)
    assert rows.values.dtype == FP8
    assert rows.scales[:n_rows].shape == (n_rows, -(-size // BLOCK) if scales == "groups" else 1)
    found = dequantized(rows)
    group = BLOCK if scales == "groups" else size
    parts = ([part for row in rows for part in row.split(group)] for rows in (found, x.double()))
    for part, expected in zip(*parts, strict=True):
        largest = float(expected.abs().max())
        assert (part - expected).abs().max() <= largest * 2.0**-4 + 1e-9
        # e4m3 has three bits of fraction down to 2^-6 of its 448.
        normals = expected.abs() > largest * 2.0**-14
        assert ((part - expected).abs() <= expected.abs() * 2.0**-4 * 1.01)[normals].all()


@on_device_only
@pytest.mark.parametrize("scales", ["rows", "groups"])
@pytest.mark.parametrize(("n_rows", "size"), [(1, 384), (3, 200)])
def test_the_activation_is_rounded_to_fp8(n_rows: int, size: int, scales: RowScales) -> None:
    gate_up = normal(n_rows, 2 * size, dtype=DTYPE)
    gate, up = gate_up.double().chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up
    found = dequantized(silu_and_multiply_to_fp8(gate_up, scales))
    assert ((found - expected).abs() <= expected.abs() * 2.0**-4 * 1.01 + expected.abs().amax() * 2.0**-10).all()


@on_device_only
@pytest.mark.parametrize("scales", ["rows", "groups"])
def test_nan_stays_nan(scales: RowScales) -> None:
    x = normal(3, 256, dtype=DTYPE)
    x[0, 5], x[1] = float("nan"), float("nan")
    found = dequantized(quantize_rows(x, scales))
    assert torch.equal(found.isnan(), x.isnan())


@pytest.mark.parametrize("scales", ["rows", "groups"])
@pytest.mark.parametrize(("n_rows", "size"), [(1, 256), (5, 200), (3, 96)])
def test_norms_write_fp8_with_the_bits_of_two_kernels(n_rows: int, size: int, scales: RowScales) -> None:
    x, residual, weight = (normal(*shape, dtype=DTYPE) for shape in ((n_rows, size), (n_rows, size), (size,)))
    products, shares = normal(2 * n_rows, size, dtype=DTYPE), normal(n_rows, 2, dtype=DTYPE).abs()
    norm = RmsFields(weight, 1e-5)
    kernels = (
        lambda residual, out: rms_norm(residual, norm, out),
        lambda residual, out: rms_norm(x, replace(norm, adds_one=True), out, residual),
        lambda residual, out: sum_experts(products, shares, out, residual, norm),
    )
    for kernel in kernels:
        sums, same_sums, normed, rows = residual.clone(), residual.clone(), new_rows(x, None), new_rows(x, scales)
        kernel(sums, normed)
        kernel(same_sums, rows)
        expected = quantize_rows(normed, scales)
        assert torch.equal(sums, same_sums)
        assert rows.dtype == DTYPE
        assert torch.equal(rows.values[:n_rows].view(torch.uint8), expected.values[:n_rows].view(torch.uint8))
        assert torch.equal(rows.scales[:n_rows], expected.scales[:n_rows])
        both, same_sums = new_rows(x, scales, keeps_unrounded=True), residual.clone()
        kernel(same_sums, both)
        assert torch.equal(sums, same_sums)
        assert torch.equal(both.values[:n_rows].view(torch.uint8), expected.values[:n_rows].view(torch.uint8))
        assert torch.equal(both.scales[:n_rows], expected.scales[:n_rows])
        assert torch.equal(as_tensor(both), normed)


class Wrapper(base.Linear):
    """A product around another, such as one with an adapter."""

    def __init__(self, inner: base.Linear) -> None:
        self.inner = inner

    @property
    def input_scales(self) -> RowScales | None:
        return self.inner.input_scales

    def __call__(self, x: Rows, out: Tensor | None = None) -> Tensor:
        return self.inner(x, out)


@on_device_only
@pytest.mark.parametrize("scales", ["channels", "blocks"])
def test_norms_write_fp8_for_products_that_read_it(scales: Fp8Scales) -> None:
    n_rows, hidden, inner = 9, 256, 128
    fields = MixtralConfig(hidden_size=hidden, num_local_experts=4, architectures=["MixtralForCausalLM"]).to_dict()
    config = DecoderConfig.parse(fields, Path("config.json"))
    assert config.experts is not None
    gate_up, down = matrix(2 * inner, hidden, scales), matrix(hidden, inner, scales)
    linears = LinearWeights(gate_up), LinearWeights(down)
    experts = stacked(4, 2 * inner, hidden, scales), stacked(4, hidden, inner, scales)
    router = LinearWeights(normal(4, hidden, dtype=DTYPE))
    x, weights = normal(n_rows, hidden, dtype=DTYPE), NormWeights(normal(hidden, dtype=DTYPE))
    for has_fp8 in (True, False):
        built = CudaOperations(config, 8, torch.device(DEVICE), has_fp8=has_fp8)
        dense = built.linear(LinearWeights(gate_up.dequantize().to(DTYPE)))
        readers = [(built.linear(linears[0]), has_fp8), (built.mlp(MlpWeights(*linears)), has_fp8)]
        readers += [(dense, False), (Wrapper(readers[0][0]), has_fp8)]
        if has_fp8:
            mixture = ExpertsWeights(router, *map(LinearWeights, experts))
            readers += [(built.experts(mixture, config.experts), True)]
        for reader, reads_fp8 in readers:
            rows, normed = built.norm(weights, reader)(x), built.norm(weights)(x)
            assert isinstance(rows, Fp8Rows) == reads_fp8
            assert torch.equal(reader(rows), reader(normed))


@pytest.mark.parametrize("scales", ["channels", "blocks"])
@pytest.mark.parametrize("n_rows", [1, 3, 16, 17, 70])
@pytest.mark.parametrize(("n_out", "n_in"), [(192, 256), (72, 200), (130, 384)])
def test_products(n_rows: int, n_out: int, n_in: int, scales: Fp8Scales) -> None:
    weight, x = matrix(n_out, n_in, scales), normal(n_rows, n_in, dtype=DTYPE)
    rows = rounded(x, row_scales(weight))
    out, again = (poisoned(n_rows, n_out, dtype=torch.float32) for _ in range(2))
    tile = Fp8Tile(64, 16, 128) if n_rows <= 16 else Fp8Tile(64, 64, 128)
    multiply_fp8(rows.values, rows.scales, weight, out, tile)
    multiply_fp8(rows.values, rows.scales, weight, again, tile)
    check_product(out, dequantized(rows), weight)
    assert torch.equal(out, again)
    wide = poisoned(n_rows, n_out + 24, dtype=torch.float32)
    multiply_fp8(rows.values, rows.scales, weight, wide[:, 8 : n_out + 8], tile)
    assert torch.equal(wide[:, 8 : n_out + 8], out)
    assert wide[:, :8].isnan().all()
    assert wide[:, n_out + 8 :].isnan().all()


@pytest.mark.parametrize("scales", ["channels", "blocks"])
@pytest.mark.parametrize("n_rows", [2, 20])
def test_products_of_activations_in_16_bits(n_rows: int, scales: Fp8Scales) -> None:
    """Every number of FP8 occurs, subnormal ones too."""
    weight = matrix(96, 256, scales)
    numbers = torch.arange(256, device=DEVICE).to(torch.uint8)
    weight.values[0] = numbers.where(numbers.view(FP8).float().isfinite(), 0).view(FP8)
    x, out = normal(n_rows, 256, dtype=DTYPE), poisoned(n_rows, 96, dtype=torch.float32)
    multiply_fp8(x, None, weight, out, weight_only_tile(n_rows))
    check_product(out, x.double(), weight)


@pytest.mark.parametrize("rounds_input", [pytest.param(True, marks=on_device_only), False])
def test_an_mlp_with_biases(rounds_input: bool) -> None:
    n_rows, hidden, inner = 5, 128, 256
    gate_up, down = matrix(2 * inner, hidden, "channels"), matrix(hidden, inner, "channels")
    up_bias, down_bias = normal(2 * inner, dtype=DTYPE), normal(hidden, dtype=DTYPE)
    x = normal(n_rows, hidden, dtype=DTYPE)
    linears = (Fp8Linear(weight, bias, rounds_input) for weight, bias in ((gate_up, up_bias), (down, down_bias)))
    first, second = linears
    products = x.double() @ gate_up.dequantize().double().t() + up_bias
    check_near(first(x), products)
    if rounds_input:
        gate, up = products.chunk(2, -1)
        exact = (torch.nn.functional.silu(gate) * up) @ down.dequantize().double().t() + down_bias
        check_near(Mlp(first, second, "silu")(x), exact)


def check_near(found: Tensor, exact: Tensor) -> None:
    """Checks that the error is that of one to three roundings to FP8, about 2.5% each."""
    assert float((found.double() - exact).norm() / exact.norm()) < 0.08


@on_device_only
@pytest.mark.skipif(
    DEVICE == "cuda" and torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU that multiplies in FP8"
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scales", ["channels", "blocks"])
@pytest.mark.parametrize("n_rows", [1, 16, 17, 64, 200, 1000])
def test_products_of_model_size(n_rows: int, scales: Fp8Scales, dtype: torch.dtype) -> None:
    check_fp8_linear(6144, 4096, n_rows, scales, dtype)


@on_device_only
@pytest.mark.skipif(
    DEVICE == "cuda" and torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU that multiplies in FP8"
)
@pytest.mark.parametrize("n_rows", [2, 200])
def test_blocks_whose_number_is_no_multiple_of_four(n_rows: int) -> None:
    check_fp8_linear(256, 8960, n_rows, "blocks", torch.bfloat16)


def check_fp8_linear(n_out: int, n_in: int, n_rows: int, scales: Fp8Scales, dtype: torch.dtype) -> None:
    weight, x = matrix(n_out, n_in, scales), normal(n_rows, n_in, dtype=dtype)
    rows = quantize_rows(x, row_scales(weight))
    out, again = (fp8_linear(rows, weight) for _ in range(2))
    assert (out.dtype, out.shape, out.is_contiguous()) == (dtype, (n_rows, n_out), True)
    assert torch.equal(out, again)
    check_product(out, dequantized(rows), weight)
    for n_more, n_memory in product((0, 8, 9), (n_rows, padded_rows(n_rows), n_rows + 9)):
        # Other kernels may write rows that are not aligned, so bits may differ.
        wide, again = (poisoned(n_memory, n_out + n_more, dtype=dtype) for _ in range(2))
        found = fp8_linear(rows, weight, wide[:, :n_out])
        fp8_linear(rows, weight, again[:, :n_out])
        assert (found.data_ptr(), found.shape) == (wide.data_ptr(), (n_rows, n_out))
        assert torch.equal(wide[:n_rows, :n_out], again[:n_rows, :n_out])
        check_product(found, dequantized(rows), weight)
        assert wide[:, n_out:].isnan().all()
        assert wide[padded_rows(n_rows) :].isnan().all()


@pytest.mark.parametrize("scales", ["channels", "blocks"])
@pytest.mark.parametrize(
    "n_rows", [1, 3, 17, pytest.param(70, marks=on_device_only), pytest.param(301, marks=on_device_only)]
)
def test_inputs_of_delta_nets(n_rows: int, scales: Fp8Scales) -> None:
    """Their gates are another product, of the rows before they are rounded."""
    world, hidden = World(delta_net(), [Span(0, 0, 1)], DTYPE), 512
    n_inputs = world.config.n_inputs - 2 * world.config.n_value_heads
    weight = matrix(n_inputs, hidden, scales)
    gates = Linear(normal(2 * world.config.n_value_heads, hidden, dtype=DTYPE), None)
    layer = GatedDeltaNet(world.weights, Fp8Linear(weight, None, rounds_input=True), world.config, 1e-6, gates)
    x = normal(n_rows, hidden, dtype=DTYPE)
    norm = RMSNorm(normal(hidden, dtype=DTYPE), 1e-6, False, layer.input_scales, layer.reads_unrounded)
    rows, normed = norm(x), replace(norm, out_scales=None)(x)
    assert isinstance(rows, Fp8Rows)
    out, again = (poisoned(padded_rows(n_rows), world.config.n_inputs, dtype=DTYPE) for _ in range(2))
    layer.project(rows, out)
    layer.project(normed, again)
    assert torch.equal(out[:n_rows], again[:n_rows])
    check_product(out[:n_rows, :n_inputs], dequantized(rows), weight)
    check_close(out[:n_rows, n_inputs:], normed.double() @ gates.weight.double().t(), slack=4.0)


@pytest.mark.parametrize("scales", ["channels", "blocks"])
@pytest.mark.parametrize("n_tokens", [1, 9, 50])
def test_rows_of_a_mixture_are_rounded_once(
    n_tokens: int, scales: Fp8Scales, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the norm before it, or for all experts and the shared one; by chunks if there are several."""
    n_experts, hidden, inner = 8, 256, 128
    gate_up, down = stacked(n_experts, 2 * inner, hidden, scales), stacked(n_experts, hidden, inner, scales)
    one, other = matrix(2 * inner, hidden, scales), matrix(hidden, inner, scales)
    router, weight = (Linear(normal(n, hidden, dtype=DTYPE), None) for n in (n_experts, 1))
    rounded_shapes: list[tuple[int, ...]] = []

    def rounding(x: Tensor, kind: RowScales) -> Fp8Rows:
        rounded_shapes.append(tuple(x.shape))
        return quantize_rows(x, kind)

    for module in (layers, operations):
        monkeypatch.setattr(module, "quantize_rows", rounding)
    x = normal(n_tokens, hidden, dtype=DTYPE)
    for is_dense in (False, True):
        matrices = (each.dequantize().to(DTYPE) if is_dense else each for each in (one, other))
        halves = (
            Linear(each, None) if isinstance(each, Tensor) else Fp8Linear(each, None, rounds_input=True)
            for each in matrices
        )
        mixture = Experts(
            router,
            LinearWeights(gate_up),
            LinearWeights(down),
            "silu",
            n_active=2,
            normalizes=True,
            shared=SharedExpert(Mlp(*halves, "silu"), weight),
            chunk_tokens=40,
        )
        norm = RMSNorm(normal(hidden, dtype=DTYPE), 1e-6, False, mixture.input_scales, mixture.reads_unrounded)
        rows, normed = norm(x), replace(norm, out_scales=None)(x)
        assert isinstance(rows, Fp8Rows)
        found = []
        for read, n_rounded in ((rows, 0 if n_tokens <= 40 else 2), (normed, 1 if n_tokens <= 40 else 2)):
            rounded_shapes.clear()
            found.append(mixture(read))
            assert [shape[1] for shape in rounded_shapes].count(hidden) == n_rounded
        assert torch.equal(*found)
        assert found[0].isfinite().all()


@pytest.mark.parametrize("scales", ["channels", "blocks"])
@pytest.mark.parametrize("has_room", [False, True])
@pytest.mark.parametrize(
    ("n_tokens", "n_experts", "hidden", "inner"),
    [(3, 5, 256, 128), (40, 5, 200, 144), (300, 5, 256, 128), (110, 3, 200, 144), (110, 3, 200, 256)],
)
def test_products_of_experts(
    n_tokens: int, n_experts: int, hidden: int, inner: int, scales: Fp8Scales, has_room: bool
) -> None:
    """Each pair of a token and an expert is the product with that expert's matrix.

    With many rows for each expert, gate and up are apart, unless a block has both. With scales of blocks and room
    the second half has parts of the first one's row tiles.
    """
    n_active = 2
    down = stacked(n_experts, hidden, inner, scales)
    tiles = grouped_tiles(n_tokens * n_active, n_experts, 1, has_room=has_room, has_blocks=down.has_blocks)
    has_many = n_tokens * n_active > 64 * n_experts
    assert (tiles.second.rows >= 64) == has_many
    assert (tiles.first != tiles.second) == (has_many and has_room and down.has_blocks)
    routing = route(normal(n_tokens, n_experts, dtype=DTYPE), n_active, tiles.first.rows, normalizes=True)
    expert_of = expert_of_position(routing.tiles, n_tokens * n_active)
    gated = rounded(normal(n_tokens * n_active, inner, dtype=DTYPE), row_scales(down))
    products = poisoned(n_tokens * n_active, hidden, dtype=torch.float32)
    grouped_linear(gated, LinearWeights(down), routing, tiles.second, products)
    for position, pair in enumerate(routing.order.tolist()):
        row = dequantized(gated)[position : position + 1]
        check_product(products[pair : pair + 1], row, down.expert(expert_of[position]))

    gate_up = stacked(n_experts, 2 * inner, hidden, scales)
    x = rounded(normal(n_tokens, hidden, dtype=DTYPE), row_scales(gate_up))
    out = poisoned(n_tokens * n_active, inner, dtype=torch.float32)
    grouped_linear(x, LinearWeights(gate_up), routing, tiles.first, out, "silu")
    for position, pair in enumerate(routing.order.tolist()):
        matrix_of = gate_up.expert(expert_of[position]).dequantize().double()
        gate, up = (dequantized(x)[pair // n_active] @ matrix_of.t()).chunk(2)
        expected = torch.nn.functional.silu(gate) * up
        assert ((out[position] - expected).abs() <= 0.02 * (expected.abs() + expected.abs().mean())).all()


def stacked(n_experts: int, n_out: int, n_in: int, scales: Fp8Scales) -> Fp8Matrix:
    made = Fp8Matrix.allocate((n_experts, n_out, n_in), scales=scales, device=torch.device(DEVICE))
    for index in range(n_experts):
        made.expert(index).quantize(normal(n_out, n_in, dtype=torch.float32, scale=0.1 * (index + 1)))
    return made


def expert_of_position(tiles: Tensor, n_pairs: int) -> list[int]:
    """Returns the expert of each place in a routing's order."""
    found = [-1] * n_pairs
    for expert, first, end in tiles.t().tolist():
        if expert >= 0:
            found[first:end] = [expert] * (end - first)
    return found


@on_device_only
@pytest.mark.parametrize("scales", ["channels", "blocks"])
@pytest.mark.parametrize("n_tokens", [1, 30, 400])
def test_a_mixture_of_experts(n_tokens: int, scales: Fp8Scales) -> None:
    """Errors are those of rounding to FP8, and the same bits come every time."""
    n_experts, hidden, inner = 16, 256, 128
    gate_up, down = stacked(n_experts, 2 * inner, hidden, scales), stacked(n_experts, hidden, inner, scales)
    router = Linear(normal(n_experts, hidden, dtype=DTYPE), None)

    def experts(one: Tensor | Fp8Matrix, other: Tensor | Fp8Matrix) -> Experts:
        linears = LinearWeights(one), LinearWeights(other)
        return Experts(router, *linears, "silu", n_active=4, normalizes=True)

    x = normal(n_tokens, hidden, dtype=DTYPE)
    dense = experts(*(each.dequantize().to(DTYPE) for each in (gate_up, down)))
    found, again = (experts(gate_up, down)(x) for _ in range(2))
    assert torch.equal(found, again)
    check_near(found, dense(x).double())
