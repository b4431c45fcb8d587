"""Attention of layers whose heads have several shapes: each shape is planned and computed by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from radixkv.runtime.device.attention.base import LayerAttention
from radixkv.runtime.device.attention.cuda.base import AttentionPlanner, AttentionShape, DecodeRows
from radixkv.runtime.device.attention.cuda.decode_tiles import Variant
from radixkv.runtime.device.attention.cuda.paged import PagedAttention, PrefillKernel
from radixkv.runtime.device.attention.cuda.work_items import Ints
from radixkv.runtime.device.kv_dtype import UNSCALED, LayerScales
from radixkv.runtime.device.memory.cuda.staging import Staging, StagingBuffer, StagingLayout


def open_attention(
    shapes: Sequence[AttentionShape],
    windows: Sequence[int | None],
    *,
    max_rows: int,
    layout: StagingLayout,
    device: torch.device,
    kv_scales: Sequence[LayerScales] | None = None,
    sinks: Sequence[Tensor | None] | None = None,
    prefill_kernel: PrefillKernel | None = None,
) -> PagedAttention | ShapedAttention:
    """Returns attention of a model: a ``PagedAttention`` where all layers have heads of one shape.

    Args:
        shapes: [attentions].
        windows: [attentions].
        max_rows, layout, device: see ``PagedAttention``.
        kv_scales, sinks: [attentions], see there.
        prefill_kernel: see there; ``triton`` where there are several shapes.
    """
    kv_scales, sinks = kv_scales or [UNSCALED] * len(shapes), sinks or [None] * len(shapes)
    layers = {shape: [layer for layer, one in enumerate(shapes) if one == shape] for shape in shapes}
    parts = [
        PagedAttention(
            shape,
            [windows[layer] for layer in of_shape],
            max_rows=max_rows,
            layout=layout,
            device=device,
            kv_scales=[kv_scales[layer] for layer in of_shape],
            sinks=[sinks[layer] for layer in of_shape],
            prefill_kernel=prefill_kernel,
        )
        for shape, of_shape in layers.items()
    ]
    if len(parts) == 1:
        return parts[0]
    places = {
        layer: (part, index)
        for part, of_shape in enumerate(layers.values())
        for index, layer in enumerate(of_shape)
    }
    without_windows = (part for layer, (part, _) in places.items() if windows[layer] is None)
    return ShapedAttention(parts, [places[layer] for layer in range(len(shapes))], next(without_windows, 0))


@dataclass(frozen=True)
class ShapedDecode:
    """A step's decode rows, planned for each shape, in one variant."""

    steps: Sequence[Any]
    """[shapes]."""

    @property
    def n_rows(self) -> int:
        """Rows, padding included."""
        n_rows: int = self.steps[0].n_rows
        return n_rows

    @property
    def variant(self) -> Variant:
        """The variant, which selects the graph."""
        variant: Variant = self.steps[0].variant
        return variant


class ShapedAttention:
    """``base.AttentionPlanner`` over one for each shape of heads.

    The shapes have staging fields and partial results of their own, because their items differ. A step has one
    variant, so that a number of rows has as many graphs as in other models. One shape chooses it. Only this one
    looks for pages that rows share, but in steps with drafts and short prompts.

    Args:
        parts: [shapes], each for the layers of one shape, in their order.
        places: [attentions], the shape of each, and its index among those of the shape.
        leader: the shape that chooses. One with a layer without a window reads most.
    """

    def __init__(
        self, parts: Sequence[AttentionPlanner[Any, Any]], places: Sequence[tuple[int, int]], leader: int = 0
    ) -> None:
        self._parts = parts
        self._places = places
        self._leader = leader

    def connect(self, staging: Staging, tables: Tensor, window_tables: Tensor | None = None) -> None:
        """See ``AttentionPlanner.connect``."""
        for part in self._parts:
            part.connect(staging, tables, window_tables)

    def variants(self, bucket: int) -> Sequence[Variant]:
        """See ``AttentionPlanner.variants``."""
        return self._parts[self._leader].variants(bucket)

    def fits_prompts(self, starts: Ints, n_tokens: Ints) -> bool:
        """See ``AttentionPlanner.fits_prompts``."""
        return all(part.fits_prompts(starts, n_tokens) for part in self._parts)

    def plan_decode(
        self,
        staged: StagingBuffer,
        rows: DecodeRows,
        bucket: int | None = None,
        variant: Variant | None = None,
    ) -> ShapedDecode:
        """See ``AttentionPlanner.plan_decode``."""
        leading = self._parts[self._leader].plan_decode(staged, rows, bucket, variant)
        return ShapedDecode(
            [
                leading if index == self._leader else part.plan_decode(staged, rows, bucket, leading.variant)
                for index, part in enumerate(self._parts)
            ]
        )

    def plan_prompts(self, batch_slots: Ints, starts: Ints, n_tokens: Ints) -> list[Any]:
        """See ``AttentionPlanner.plan_prompts``."""
        return [part.plan_prompts(batch_slots, starts, n_tokens) for part in self._parts]

    def step(self, decode: ShapedDecode | None, prompts: Sequence[Any] | None) -> ShapedStep:
        """See ``AttentionPlanner.step``."""
        n_parts = len(self._parts)
        steps: Sequence[Any] = [None] * n_parts if decode is None else decode.steps
        launches: Sequence[Any] = [None] * n_parts if prompts is None else prompts
        planned = zip(self._parts, steps, launches, strict=True)
        return ShapedStep([part.step(rows, others) for part, rows, others in planned], self._places)


@dataclass(frozen=True)
class ShapedStep:
    """Attention of one planned step: ``LayerAttention``."""

    parts: Sequence[LayerAttention]
    """[shapes]."""
    places: Sequence[tuple[int, int]]
    """[attentions], the shape of each, and its index among those of the shape."""

    def run(self, layer: int, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
        """Computes one layer, as ``LayerAttention.run``."""
        part, index = self.places[layer]
        self.parts[part].run(index, q, k_cache, v_cache, out)
