"""Attention of layers whose heads have several shapes, planned as for a step, against the definition in float64."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kernel_support import DEVICE, check_close, on_kernels, poisoned
from test_gpu_kernels_prompts import SHARED_BYTES, World, shape_of

from radixkv.runtime.device.attention.cuda.base import DecodeRows
from radixkv.runtime.device.attention.cuda.decode_tiles import Variant
from radixkv.runtime.device.attention.cuda.run_selection import SharingCosts
from radixkv.runtime.device.attention.cuda.shaped import ShapedAttention, ShapedDecode, open_attention
from radixkv.runtime.device.memory.cuda.staging import Staging, StagingBuffer, StagingLayout
from radixkv.runtime.step.plan import SharedRun

pytestmark = on_kernels
WINDOWS = (30, None, 30, None, None)
KINDS = (0, 1, 0, 1, 0)
"""The shape of each layer. One has layers with and without a window."""
DECODE = ((99, 1), (69, 1), (69, 1))
PROMPTS = ((5, 40), (0, 20))


class Shapes:
    """Two pools with the same block tables, and attention over both."""

    def __init__(self, rows: Sequence[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, has_8_bits: bool) -> None:
        if DEVICE == "cpu":
            gpu = SimpleNamespace(
                major=8, minor=9, multi_processor_count=4, shared_memory_per_multiprocessor=SHARED_BYTES
            )
            monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
        shapes = shape_of(4, 2, 64, has_8_bits=has_8_bits), shape_of(1, 8, 512, has_8_bits=has_8_bits)
        self.worlds = []
        for shape in shapes:
            torch.manual_seed(3)
            self.worlds.append(World(shape, [None], rows))
        tables = self.worlds[0].tables
        assert torch.equal(tables, self.worlds[1].tables)
        layout = StagingLayout()
        self.attention = open_attention(
            [shapes[kind] for kind in KINDS],
            WINDOWS,
            max_rows=len(rows),
            layout=layout,
            device=tables.device,
            kv_scales=[self.worlds[kind].scales for kind in KINDS],
            prefill_kernel="triton",
        )
        assert isinstance(self.attention, ShapedAttention)
        self.staging = Staging(layout, tables.device)
        self.staged = StagingBuffer(torch.zeros(layout.size).int())
        self.attention.connect(self.staging, tables)
        self.slots = np.array(self.worlds[0].slots, np.int32)
        self.starts, self.n_tokens = (np.array(column, np.int32) for column in zip(*rows, strict=True))

    def plan(self, n_decode: int, variant: Variant | None, **more: object) -> ShapedDecode:
        rows = DecodeRows(self.slots[:n_decode], self.starts[:n_decode] + 1, **more)  # type: ignore[arg-type]
        planned = self.attention.plan_decode(self.staged, rows, variant=variant)
        assert isinstance(planned, ShapedDecode)
        self.staging.send(self.staged)
        return planned

    def check(self, decode: ShapedDecode | None, n_decode: int) -> None:
        """Computes all layers, and compares each."""
        prompts = None
        if n_decode < len(self.slots):
            parts = (self.slots[n_decode:], self.starts[n_decode:], self.n_tokens[n_decode:])
            prompts = self.attention.plan_prompts(*parts)
        step = self.attention.step(decode, prompts)  # type: ignore[arg-type]
        for layer, (window, kind) in enumerate(zip(WINDOWS, KINDS, strict=True)):
            world = self.worlds[kind]
            out = poisoned(*world.q.shape, dtype=world.shape.dtype)
            step.run(layer, world.q, world.k, world.v, out)
            check_close(out, world.expected(window), n_roundings=3, slack=1.0)


@pytest.mark.parametrize("variant", ["whole", "split", "shared", None])
@pytest.mark.parametrize("has_8_bits", [False, True])
def test_a_mixed_step(has_8_bits: bool, variant: Variant | None, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = Shapes([*DECODE, *PROMPTS], monkeypatch, has_8_bits)
    shapes.check(shapes.plan(len(DECODE), variant), len(DECODE))


def test_steps_of_one_kind_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = Shapes(DECODE, monkeypatch, has_8_bits=False)
    shapes.check(shapes.plan(len(DECODE), None), len(DECODE))
    shapes = Shapes(PROMPTS, monkeypatch, has_8_bits=False)
    shapes.check(None, 0)


def test_pages_that_rows_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shape that has a layer without a window first reads them once; the other reads them for each row."""
    free = SharingCosts(launches_ns=0.0, run_ns=0.0)
    monkeypatch.setattr(SharingCosts, "for_kernel", lambda kernel: free)
    rows = [(99, 1)] * 12
    shapes = Shapes(rows, monkeypatch, has_8_bits=False)
    for world in shapes.worlds:
        world.tables[:, :6] = world.tables[world.slots[0], :6].clone()
    for world in shapes.worlds:
        assert not world.expected(None).isnan().any()
    step = shapes.plan(len(rows), None, shared=[SharedRun(tuple(range(12)), 0, 6)])
    assert step.variant == "shared"
    assert {one.variant for one in step.steps} == {"shared"}
    shapes.check(step, len(rows))


def test_tokens_of_one_request_as_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(60 + i, 1) for i in range(5)]
    shapes = Shapes(rows, monkeypatch, has_8_bits=False)
    for world in shapes.worlds:
        world.tables[:] = world.tables[world.slots[-1]].clone()
    step = shapes.plan(len(rows), None, counts=np.array([3, 2], np.int32))
    assert step.variant == "extend"
    shapes.check(step, len(rows))


def test_variants_are_those_of_the_shape_without_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = Shapes(DECODE, monkeypatch, has_8_bits=False).attention
    assert attention.variants(1) == ["whole", "split"]
    assert attention.variants(2) == ["whole", "split", "shared", "extend"]


def test_layers_of_one_shape_have_plain_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = Shapes(DECODE, monkeypatch, has_8_bits=False)
    shape = shapes.worlds[0].shape
    attention = open_attention(
        [shape] * 3,
        [None, 30, None],
        max_rows=4,
        layout=StagingLayout(),
        device=torch.device(DEVICE),
        prefill_kernel="triton",
    )
    assert not isinstance(attention, ShapedAttention)
