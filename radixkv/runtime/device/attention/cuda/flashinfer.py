"""Calls of FlashInfer's attention kernels with our own plans.

This relies on more than FlashInfer's public interface: the order of a plan's values and of ``paged_run``'s
arguments. ``machine.PACKAGES`` limits FlashInfer to the releases for which both were read and tested.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from radixkv.runtime.device.attention.cuda.base import AttentionShape
from radixkv.runtime.device.attention.cuda.flashinfer_modules import FlashInferKernel, load
from radixkv.runtime.device.attention.cuda.merge import PartialResults
from radixkv.runtime.device.attention.cuda.work_items import Fa2Fields
from radixkv.runtime.device.kv_dtype import FP8, LayerScales

_NHD = 0
_MASKS = {False: 0, True: 1}
_FA2_NOTHING = (None,) * 8
"""Masks, slopes, prefixes and scales of blocks."""
_FA3_NOTHING = (None,) * 4
"""Prefixes, and scales of V's heads."""
_NO_SCALES = (None,) * 3
"""Scales of the heads of Q, K and V."""
_NO_CAP = 0.0
"""Soft cap of the scores, off."""
_NO_ROTATION = (1.0, 1e-4)
"""Reciprocals of scale and theta of a rotation that is off."""
_NO_ITEMS = 0
"""Length of positions within items of a prompt, with a mask that is off."""


def fa2_tile(head_dim: int) -> int:
    """Returns the (query, head) pairs of one KV head in a tile of the FA2 kernel."""
    return 64 if head_dim > 128 else 128


@dataclass(frozen=True)
class FlashInferLaunch:
    """A planned kernel call, with the arguments that are the same for all layers."""

    backend: FlashInferKernel
    module: Any
    workspaces: tuple[Any, ...]
    positions: tuple[Any, ...]
    options: tuple[Any, ...]
    """From ``maybe_lse`` to ``enable_pdl``."""
    scale: float
    """Multiplier of the scores."""
    is_merged: bool
    """Whether results are merged by ``merge.merge_results``, which multiplies them by V's scale."""

    def __call__(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, scales: LayerScales) -> None:
        """Enqueues the call.

        Args:
            q: [queries, heads, head_dim].
            k_cache, v_cache: [pages, page_size, kv_heads, head_dim].
            out: [queries, heads, head_dim], contiguous.
            scales: of K and V.
        """
        value_scale = 1.0 if self.is_merged else scales.v
        takes_scales = q.dtype == FP8
        last: tuple[Any, ...]
        if takes_scales:
            last = *_NO_SCALES, self.scale, 1.0, scales.k, value_scale
        elif self.backend == "fa3":
            last = *_FA3_NOTHING, _NO_CAP, self.scale * scales.k, 1.0, _NO_ITEMS
        else:
            last = *_FA2_NOTHING, _NO_CAP, self.scale * scales.k, *_NO_ROTATION, _NO_ITEMS
        self.module.paged_run(*self.workspaces, q, k_cache, v_cache, *self.positions, out, *self.options, *last)
        if not takes_scales and value_scale != 1.0:
            out.mul_(value_scale)


class _Kernel:
    """A kernel of FlashInfer.

    Args:
        shape: of the layer.
        window: positions that a token attends to, its own included; None for all.
        tables: [batch slots, width] int32 block tables, at a fixed address.
    """

    _backend: FlashInferKernel

    def __init__(self, shape: AttentionShape, window: int | None, tables: Tensor) -> None:
        capability = torch.cuda.get_device_capability(tables.device)
        self._module = load(self._backend, shape, window is not None, capability)
        self._scale = shape.scale
        self._options = _options(window)
        self._entries = tables.view(-1)
        self._unused = torch.empty(16, dtype=torch.uint8, device=tables.device)


class Fa2Kernel(_Kernel):
    """FlashInfer's FA2 kernel over work items."""

    _backend = "fa2"

    def launch(
        self,
        fields: Fa2Fields,
        staged: Tensor,
        n_items: int,
        tile: int,
        *,
        results: PartialResults | None = None,
        is_causal: bool = False,
        lse: Tensor | None = None,
    ) -> FlashInferLaunch:
        """Plans a launch of items.

        Args:
            fields: offsets of the kernel's arrays in ``staged``.
            staged: int32 on the device, the staged field of ``fields``.
            n_items: items to launch, padding included.
            tile: most (query, head) pairs of an item: 16, 64 or 128.
            results: memory for partial results. With None the items write to ``out`` of the launch; padding then
                costs more.
            is_causal: whether an item's queries are the last positions that it reads; otherwise each query attends
                to all of them.
            lse: [queries, heads] float32, filled with log2 of each query's sum of exponentials; only without
                ``results``, which have their own.
        """
        is_partial = int(results is not None)
        plan = [
            n_items,
            1,
            4 * (fields.constants + 1),
            tile,
            4 * fields.requests,
            4 * fields.zeros,
            4 * fields.zeros,
            4 * fields.zeros,
            4 * fields.results,
            4 * fields.constants,
            0,
            0 if results is None else results.values.nbytes,
            4 * fields.is_item,
            is_partial,  # FlashInfer's padding of a graph: blocks with ``is_item`` 0 end at once
            is_partial,  # FlashInfer then merges the number of queries in ``constants``: none
        ]
        positions = (
            staged[fields.query_indptr :],
            staged[fields.page_indptr : fields.page_indptr + 2 * fields.capacity + 1],
            self._entries,
            staged[fields.last_page_lens :],
        )
        workspace = self._unused if results is None else results.workspace
        return FlashInferLaunch(
            "fa2",
            self._module,
            (workspace, staged, plan),
            positions,
            (lse, _MASKS[is_causal], *self._options),
            self._scale,
            is_merged=results is not None,
        )


class Fa3Kernel(_Kernel):
    """FlashInfer's FA3 kernel, on Hopper.

    With K and V of 8 bits, the queries of a launch are of 8 bits too.
    """

    _backend = "fa3"

    def launch(
        self,
        staged: Tensor,
        plan: list[int],
        *,
        is_causal: bool = True,
        lse: Tensor | None = None,
        is_merged: bool = False,
    ) -> FlashInferLaunch:
        """Plans a launch of tiles.

        Args:
            staged: int32 on the device: the arrays of a ``Fa3Schedule`` or ``Fa3Fields``.
            plan: the ``plan`` of that ``Fa3Schedule`` or ``Fa3Fields``.
            is_causal: whether a tile's queries are the last positions that it reads; otherwise each query attends
                to all of them.
            lse: [queries, heads] float32, filled with log2 of each query's sum of exponentials.
            is_merged: whether the results are merged, by their ``lse``.
        """
        positions = (staged, staged, self._entries, staged)
        options = (lse, _MASKS[is_causal], *self._options)
        return FlashInferLaunch(
            "fa3",
            self._module,
            (self._unused, staged, plan),
            positions,
            options,
            self._scale,
            is_merged=is_merged,
        )


def _options(window: int | None) -> tuple[Any, ...]:
    """Returns ``paged_run``'s arguments from ``layout`` to ``enable_pdl``."""
    # FlashInfer 0.7.2's FA2 kernel returns from padding before it waits for the previous kernel, so that the next
    # kernel could overtake both.
    has_early_start = False
    return _NHD, -1 if window is None else window - 1, has_early_start
