"""Nothing is compiled between steps: a compilation takes a hundred milliseconds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from delta_net_world import Span, World, delta_net
from kernel_support import DEVICE, integers, normal, on_device_only, on_kernels, poisoned, triton
from mamba2_world import Mamba2World, mamba2
from msgspec.structs import replace
from torch import Tensor

from radixkv.runtime.device.machine import MIN_FP8_CAPABILITY
from radixkv.runtime.device.ops.base import RmsFields, TokenInputs
from radixkv.runtime.device.ops.cuda.argmax import argmax, argmax_scratch
from radixkv.runtime.device.ops.cuda.fp8_rows import row_scales
from radixkv.runtime.device.ops.cuda.layers import Fp8Linear, Linear, RMSNorm
from radixkv.runtime.device.ops.cuda.linear import add_linear_and_norm, gated_linear
from radixkv.runtime.device.ops.cuda.logit_cap import cap_logits
from radixkv.runtime.device.ops.cuda.norm import rms_norm
from radixkv.runtime.device.ops.cuda.operations import Experts
from radixkv.runtime.device.ops.cuda.rotary import RotateAndStore
from radixkv.runtime.device.ops.cuda.token_inputs import prepare_token_inputs, update_tables
from radixkv.runtime.device.pack import RowArrays
from radixkv.runtime.device.sampling.cuda.sampler import CudaSampler
from radixkv.runtime.device.weights.fp8_matrix import Fp8Matrix, Fp8Scales
from radixkv.runtime.device.weights.layer_weights import LinearWeights
from radixkv.runtime.step.plan import History, RowSampling

pytestmark = [*on_kernels, on_device_only]
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 512, 4, 2, 128, 1024
LARGE_VOCAB = 40_000
"""Large enough that argmax works in several parts, whose number depends on the number of rows."""


def test_steps_of_other_sizes_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def note(*, repr: str, **_: object) -> None:
        compiled.append(repr)

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    step = Step()
    for n_rows, n_tokens in ((1, 1), (2, 1), (40, 1), (100, 1), (2, 30)):
        step.run(n_rows, n_tokens, shift=0)
    compiled.clear()
    for n_rows, n_tokens in (
        (3, 1),
        (16, 1),
        (17, 1),
        (33, 1),
        (64, 1),
        (1, 7),
        (1, 16),
        (5, 100),
        (2, 513),
        (1, 900),
    ):
        for shift in range(4):
            step.run(n_rows, n_tokens, shift)
    assert not compiled


@pytest.mark.parametrize("scales", [None, "channels", "blocks"])
def test_experts_of_other_sizes_compile_nothing(monkeypatch: pytest.MonkeyPatch, scales: Fp8Scales | None) -> None:
    """One size for each tile, and for each number of tokens that a program routes, compiles everything."""
    if scales is not None and torch.cuda.get_device_capability() < MIN_FP8_CAPABILITY:
        pytest.skip("this GPU does not multiply in FP8")
    compiled: list[str] = []

    def note(*, repr: str, **_: object) -> None:
        compiled.append(repr)

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    dtype, n_experts, inner = torch.bfloat16, 128, 192

    def weights(*shape: int) -> LinearWeights:
        dense = normal(*shape, dtype=dtype)
        if scales is None:
            return LinearWeights(dense)
        matrix = Fp8Matrix.allocate(shape, scales=scales, device=dense.device)
        for index in range(len(dense)) if dense.ndim == 3 else ():
            matrix.expert(index).quantize(dense[index])
        if dense.ndim == 2:
            matrix.quantize(dense)
        return LinearWeights(matrix)

    gate_up, down, qkv = (
        weights(*shape) for shape in ((n_experts, 2 * inner, HIDDEN), (n_experts, HIDDEN, inner), (256, HIDDEN))
    )
    router = Linear(normal(n_experts, HIDDEN, dtype=dtype), None)
    mixture = Experts(router, gate_up, down, "silu", n_active=8, normalizes=True)
    all_rows = normal(4096, HIDDEN, dtype=dtype)
    out_scales = None if scales is None else row_scales(qkv.weight)
    norm = RMSNorm(normal(HIDDEN, dtype=dtype), 1e-6, False, out_scales)
    reader = Linear(qkv.weight, None) if scales is None else Fp8Linear(qkv.weight, None, rounds_input=True)

    def run(n_rows: int) -> None:
        for shift in range(3):
            x = all_rows[shift:][:n_rows]
            reader(mixture.add_and_norm(x, x.clone(), norm))
            reader(norm(x))
            reader(x)

    for n_rows in (1, 2, 16, 32, 33, 200, 2000):
        run(n_rows)
    compiled.clear()
    for n_rows in (3, 7, 15, 17, 31, 64, 100, 128, 129, 512, 1000, 1024, 1025, 3001):
        run(n_rows)
    assert not compiled


@pytest.mark.parametrize("kind", ["delta net", "Mamba2"])
def test_layers_with_states_of_other_sizes_compile_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt and rows of one token compile everything."""
    compiled: list[str] = []

    def note(*, repr: str, **_: object) -> None:
        compiled.append(repr)

    def run(*spans: Span) -> None:
        if kind == "Mamba2":
            Mamba2World(mamba2(), spans, torch.bfloat16).run()
        else:
            World(delta_net(), spans, torch.bfloat16).run()

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    run(Span(0, 0, 1, is_decode=True), Span(1, 0, 64))
    compiled.clear()
    for n_rows in range(1, 6):
        run(*(Span(slot, 7, 1, is_decode=True) for slot in range(n_rows)))
        run(*(Span(slot, slot * 9, 1 + 63 * slot) for slot in range(n_rows)))
        run(Span(5, 3, 1, is_decode=True), *(Span(slot, 0, 16, saves={}) for slot in range(n_rows)))
    run(Span(2, 16, 300, saves={64: 0, 128: 1}))
    assert not compiled


def test_sampling_of_other_sizes_compiles_nothing_after_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def note(*, repr: str, **_: object) -> None:
        compiled.append(repr)

    sampler = CudaSampler(64, LARGE_VOCAB, torch.device(DEVICE))
    sampler.warm_up(torch.bfloat16)
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    plain = RowSampling(temperature=0.7, top_k=0, top_p=0.9, seed=3, index=1)
    listed = replace(plain, top_k=20, n_logprobs=4)
    edits = {"history": History(bytes(4), 1), "presence_penalty": 0.5, "logit_bias": ((3, 1.0), (4, 2.0))}
    kinds = (plain, listed, replace(plain, **edits), replace(listed, **edits))
    for n_rows in (1, 3, 4, 8, 40):
        choice = integers([1] * 100)
        for shift in range(4):
            greedy, finite = choice[shift:][: 2 * n_rows].view(2, -1)
            rows = [kinds[(row + shift) % 4] for row in range(n_rows)]
            sampler.sample(normal(n_rows, LARGE_VOCAB, dtype=torch.bfloat16), range(n_rows), rows, greedy, finite)
        sampler.score(normal(n_rows, LARGE_VOCAB, dtype=torch.bfloat16), np.zeros(n_rows, np.int32), 3)
    assert not compiled


class Step:
    """All kernels of a step, over slices at any offset."""

    def __init__(self) -> None:
        dtype = torch.bfloat16
        self.x = normal(2048, HIDDEN, dtype=dtype)
        self.norm = RmsFields(normal(HIDDEN, dtype=dtype), 1e-5)
        self.gate_up, self.down = normal(2048, HIDDEN, dtype=dtype), normal(HIDDEN, 1024, dtype=dtype)
        self.qkv = normal(2048, (HEADS + 2 * KV_HEADS) * HEAD_DIM, dtype=dtype)
        self.caches = [normal(2048, 1, KV_HEADS, HEAD_DIM, dtype=dtype) for _ in range(2)]
        self.angles = torch.randn(2048, HEAD_DIM, device=DEVICE)
        self.logits = normal(128, VOCAB, dtype=dtype)
        self.scratch = argmax_scratch(128, VOCAB, self.logits.device)
        self.tables, self.last_tokens = integers([[0] * 300] * 128), integers([0] * 128)
        self.integers, self.argmax_tokens = integers([0] * 100_000), integers([0] * 200)

    def run(self, n_rows: int, n_tokens: int, shift: int) -> None:
        total = n_rows * n_tokens

        def field(n: int) -> Tensor:
            nonlocal shift
            shift += n + 1
            return self.integers[shift : shift + n]

        rows, inputs = (
            RowArrays(*(field(n_rows) for _ in range(10))),
            TokenInputs(*(field(total) for _ in range(3))),
        )
        update_tables(self.tables, rows, field(9))
        prepare_token_inputs(
            self.tables, self.last_tokens, rows, field(total), inputs, page_size=16, max_n_tokens=n_tokens
        )
        x, residual, normed = (self.x[shift % 7 :][:total] for _ in range(3))
        inner = normal(total, 1024, dtype=x.dtype)
        rms_norm(x, self.norm, normed)
        gated_linear(normed, self.gate_up, inner)
        add_linear_and_norm(inner, self.down, residual.clone(), self.norm, normed.clone())
        q = poisoned(total, HEADS, HEAD_DIM, dtype=x.dtype)
        RotateAndStore(self.angles, None, None, 1e-5)(self.qkv[:total], inputs, *self.caches, q)
        queries = self.qkv[:total, : HEADS * HEAD_DIM]  # of a layer that reads the K and V of another
        RotateAndStore(self.angles, None, None, 1e-5)(queries, inputs, *self.caches, q)
        cap_logits(self.logits[shift % 3 :][:n_rows], 30.0)
        argmax(
            self.logits[shift % 3 :][:n_rows],
            self.argmax_tokens[shift % 4 :][:n_rows],
            self.argmax_tokens[100 + shift % 4 :][:n_rows],
            self.scratch[:n_rows],
            batch_slots=rows.batch_slots,
            last_tokens=self.last_tokens,
        )
