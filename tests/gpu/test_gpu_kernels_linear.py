"""Matrix products against torch in float64, and overlapping kernels against the same kernels one by one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernel_support import DEVICE, check_close, integers, normal, on_device_only, on_kernels, poisoned
from torch import Tensor

from radixkv.runtime.device.ops.base import RmsFields, TokenInputs
from radixkv.runtime.device.ops.cuda.gated_linear import gated_tile, multiply_gated
from radixkv.runtime.device.ops.cuda.linear import add_linear_and_norm, gated_linear, linear
from radixkv.runtime.device.ops.cuda.norm import rms_norm
from radixkv.runtime.device.ops.cuda.rotary import RotateAndStore

pytestmark = on_kernels


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("n_out", "n_in"), [(34, 4096), (131, 1000), (8, 264), (10, 14336)])
def test_linear_of_one_row(n_out: int, n_in: int, dtype: torch.dtype) -> None:
    check_linear(1, n_out, n_in, dtype)


@pytest.mark.parametrize("n_rows", [2, 5, 16, 17])
@pytest.mark.parametrize(("n_out", "n_in"), [(192, 1024), (64, 128), (72, 264)])
def test_linear_of_few_rows(n_rows: int, n_out: int, n_in: int) -> None:
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter's products have no bfloat16
    check_linear(n_rows, n_out, n_in, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("n_rows", [1, 3])
@pytest.mark.parametrize(("n_inner", "n_in"), [(32, 500), (131, 1000), (10, 4352)])
def test_gated_linear(n_rows: int, n_inner: int, n_in: int, dtype: torch.dtype) -> None:
    x, weight = normal(n_rows, n_in, dtype=dtype), normal(2 * n_inner, n_in, dtype=dtype, scale=2 * n_in**-0.5)
    out = poisoned(n_rows, n_inner, dtype=dtype)
    gated_linear(x, weight, out)
    gate, up = (x.double() @ weight.double().t()).to(dtype).double().chunk(2, -1)
    check_close(out, torch.nn.functional.silu(gate) * up, slack=4.0)


@pytest.mark.parametrize(("n_rows", "n_inner", "n_in"), [(17, 200, 136), (130, 128, 64), (256, 264, 320)])
def test_multiply_gated(n_rows: int, n_inner: int, n_in: int) -> None:
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter's products have no bfloat16
    check_gated(n_rows, n_inner, n_in, dtype)


@on_device_only
@pytest.mark.parametrize("n_rows", [24, 64, 100, 256])
def test_multiply_gated_of_model_size(n_rows: int) -> None:
    check_gated(n_rows, 14336, 4096, torch.bfloat16)


def check_gated(n_rows: int, n_inner: int, n_in: int, dtype: torch.dtype) -> None:
    x, weight = normal(n_rows, n_in, dtype=dtype), normal(2 * n_inner, n_in, dtype=dtype, scale=2 * n_in**-0.5)
    out = poisoned(n_rows, n_inner, dtype=dtype)
    multiply_gated(x, weight, out, gated_tile(n_rows))
    gate, up = (x.double() @ weight.double().t()).to(dtype).double().chunk(2, -1)
    check_close(out, torch.nn.functional.silu(gate) * up, slack=4.0)


@on_device_only
@pytest.mark.parametrize("n_rows", [1, 2, 3, 16, 33])
@pytest.mark.parametrize(("n_out", "n_in"), [(6144, 4096), (4096, 14336)])
def test_linear_of_model_size(n_rows: int, n_out: int, n_in: int) -> None:
    check_linear(n_rows, n_out, n_in, torch.bfloat16)


def check_linear(n_rows: int, n_out: int, n_in: int, dtype: torch.dtype) -> None:
    x, weight = normal(n_rows, n_in, dtype=dtype), normal(n_out, n_in, dtype=dtype)
    expected = x.double() @ weight.double().t()
    out, again = (poisoned(n_rows, n_out, dtype=dtype) for _ in range(2))
    linear(x, weight, out)
    linear(x, weight, again)
    # cuBLAS may round parts of a sum before it adds them.
    slack = 0.1 if n_rows == 1 else 2.0
    check_close(out, expected, slack=slack)
    assert torch.equal(out, again)
    wide = poisoned(n_rows, n_out + 16, dtype=dtype)
    linear(x, weight, wide[:, 8 : n_out + 8])
    check_close(wide[:, 8 : n_out + 8], expected, slack=slack)
    assert wide[:, :8].isnan().all()
    assert wide[:, n_out + 8 :].isnan().all()


@pytest.mark.parametrize("n_rows", [1, 5, 1024])
def test_add_linear_and_norm(n_rows: int) -> None:
    x, residual = (normal(n_rows, size, dtype=torch.float16) for size in (72, 96))
    weight, norm_weight = normal(96, 72, dtype=torch.float16, scale=0.1), normal(96, dtype=torch.float16)
    total, out = residual.double() + x.double() @ weight.double().t(), poisoned(n_rows, 96, dtype=torch.float16)
    add_linear_and_norm(x, weight, residual, RmsFields(norm_weight, 1e-5), out)
    check_close(residual, total, slack=1.0)
    expected = torch.nn.functional.rms_norm(residual.double(), (96,), norm_weight.double(), 1e-5)
    check_close(out, expected, slack=1.0)


@on_device_only
@pytest.mark.parametrize("n_rows", [1, 8, 64, 128])
def test_overlapping_kernels_read_what_earlier_ones_wrote(n_rows: int) -> None:
    """A replayed graph of dependent layers gives the same as kernels that each run alone."""
    layers = Layers(n_rows)
    alone = layers.run(torch.cuda.synchronize)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        layers.run(lambda: None)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = layers.run(lambda: None)
    for _ in range(20):
        replayed.fill_(float("nan"))
        graph.replay()
        assert torch.equal(replayed, alone)


class Layers:
    """Decoder layers whose attention is the identity."""

    N_LAYERS, HEADS, KV_HEADS, HEAD_DIM, INNER = 8, 32, 8, 128, 5120

    def __init__(self, n_rows: int) -> None:
        hidden, dtype = self.HEADS * self.HEAD_DIM, torch.bfloat16
        shapes = (
            ((self.HEADS + 2 * self.KV_HEADS) * self.HEAD_DIM, hidden),
            (hidden, hidden),
            (2 * self.INNER, hidden),
            (hidden, self.INNER),
        )
        self.weights = [
            [normal(*shape, dtype=dtype, scale=shape[1] ** -0.5) for shape in shapes] for _ in range(self.N_LAYERS)
        ]
        self.norm = RmsFields(1 + normal(hidden, dtype=dtype, scale=0.1), 1e-5)
        self.x = normal(n_rows, hidden, dtype=dtype)
        self.inputs = TokenInputs(*(integers(range(n_rows)) for _ in range(3)))
        angles = torch.rand(n_rows, self.HEAD_DIM // 2, device=DEVICE)
        self.rotate_and_store = RotateAndStore(torch.cat([angles.cos(), angles.sin()], -1), None, None, 1e-5)
        self.cache = [poisoned(n_rows, 1, self.KV_HEADS, self.HEAD_DIM, dtype=dtype) for _ in range(2)]

    def run(self, after_each: Callable[[], object]) -> Tensor:
        residual, normed = self.x.clone(), torch.empty_like(self.x)
        n_rows = len(residual)
        rms_norm(residual, self.norm, normed)
        for qkv_weight, output, gate_up_weight, down in self.weights:
            qkv, q = (
                residual.new_empty(n_rows, len(qkv_weight)),
                residual.new_empty(n_rows, self.HEADS, self.HEAD_DIM),
            )
            added, inner = torch.empty_like(residual), residual.new_empty(n_rows, self.INNER)
            linear(normed, qkv_weight, qkv)
            after_each()
            self.rotate_and_store(qkv, self.inputs, *self.cache, q)
            after_each()
            linear(q.view(n_rows, -1), output, added)
            after_each()
            rms_norm(added, self.norm, normed, residual)
            after_each()
            gated_linear(normed, gate_up_weight, inner)
            after_each()
            linear(inner, down, added)
            after_each()
            rms_norm(added, self.norm, normed, residual)
            after_each()
        return normed
