"""Calls of FlashInfer's attention kernels with our own plans.

This relies on more than FlashInfer's public interface: the order of a plan's values and of ``paged_run``'s
arguments. ``machine_cuda.PACKAGES`` limits FlashInfer to the releases for which both were read and tested.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from radixkv.runtime.device.attention.cuda.base import AttentionShape
from radixkv.runtime.device.attention.cuda.work_items import Fa2Fields
from radixkv.runtime.device.kv_dtype import FP8, LayerScales

FlashInferKernel = Literal["fa2", "fa3"]

_NHD = 0
_MASKS = {False: 0, True: 1}
_NO_ROTATION = (1.0, 1e4, 0, 0)
"""The last arguments of ``paged_run``: scale and theta of a rotation that is off, and two unused sizes."""


def load(backend: FlashInferKernel, shape: AttentionShape, is_windowed: bool) -> Any:
    """Loads FlashInfer's module. Compiling takes minutes where it is not prebuilt.

    With K and V of 8 bits, FA2 converts them to the queries' dtype, and FA3 takes queries of 8 bits.
    """
    from flashinfer.prefill import get_batch_prefill_module

    return get_batch_prefill_module(backend, *_module(backend, shape, is_windowed))


def not_compiled(shape: AttentionShape, windows: Sequence[int | None], capability: tuple[int, ...]) -> list[str]:
    """Returns the names of modules that ``load`` would compile for layers with these windows on such a GPU."""
    from flashinfer.jit import gen_batch_prefill_module

    backend = backend_of(capability)
    kinds = sorted({window is not None for window in windows})
    specs = [gen_batch_prefill_module(backend, *_module(backend, shape, is_windowed)) for is_windowed in kinds]
    return [spec.name for spec in specs if not spec.is_compiled]


def backend_of(capability: tuple[int, ...]) -> FlashInferKernel:
    """Returns the backend of prompts and of large tiles: FA3 on Hopper, which alone supports it, else FA2.

    With K and V of 8 bits FA3 rounds queries and weights of the softmax to 8 bits too. FA2 does not, but converts K
    and V, for which an 8B model's prompts take twice as long.
    """
    return "fa3" if capability == (9, 0) else "fa2"


def fa2_tile(head_dim: int) -> int:
    """Returns the (query, head) pairs of one KV head in a tile of the FA2 kernel."""
    return 64 if head_dim > 128 else 128


def _module(backend: FlashInferKernel, shape: AttentionShape, is_windowed: bool) -> tuple[Any, ...]:
    query_dtype = shape.kv_dtype if backend == "fa3" else shape.dtype
    dim = shape.head_dim
    return query_dtype, shape.kv_dtype, shape.dtype, torch.int32, dim, dim, 0, is_windowed, False, False


@dataclass(frozen=True)
class PartialResults:
    """Partial results of attention, to be merged."""

    workspace: Tensor
    """The memory of ``values`` and ``lse``, as FlashInfer's FA2 kernel takes it."""
    values: Tensor
    """[n, heads, head_dim]: each divided by its sum of exponentials."""
    lse: Tensor
    """[n, heads] float32: log2 of each result's sum of exponentials."""
    head_steps: tuple[int, int]
    """Distance between the first heads of two KV heads, and between two heads of one KV head."""

    @classmethod
    def allocate(
        cls, n: int, shape: AttentionShape, device: torch.device, *, by_member: bool = False
    ) -> PartialResults:
        """Allocates memory for ``n`` results.

        Args:
            n: number of results.
            shape: of the layer.
            device: where to allocate.
            by_member: whether heads are ordered by their index within the KV head first, as ``Fa3Kernel`` stores
                the results of large items.
        """
        n_values = n * shape.n_heads
        n_bytes = n_values * shape.head_dim * shape.dtype.itemsize
        workspace = torch.zeros(n_bytes + 4 * n_values, dtype=torch.uint8, device=device)
        values = workspace[:n_bytes].view(shape.dtype).view(n, shape.n_heads, shape.head_dim)
        lse = workspace[n_bytes:].view(torch.float32).view(n, shape.n_heads)
        return cls(workspace, values, lse, (1, shape.n_kv_heads) if by_member else (shape.group, 1))


@dataclass(frozen=True)
class FlashInferLaunch:
    """A planned kernel call, with the arguments that are the same for all layers."""

    module: Any
    workspaces: tuple[Any, ...]
    positions: tuple[Any, ...]
    options: tuple[Any, ...]
    """From ``maybe_lse`` to ``logits_soft_cap``."""
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
        factors = (
            (self.scale, 1.0, scales.k, value_scale) if takes_scales else (self.scale * scales.k, None, None, None)
        )
        self.module.paged_run(
            *self.workspaces, q, k_cache, v_cache, *self.positions, out, *self.options, *factors, *_NO_ROTATION
        )
        if not takes_scales and value_scale != 1.0:
            out.mul_(value_scale)


class Fa2Kernel:
    """FlashInfer's FA2 kernel over work items.

    Args:
        shape: of the layer.
        window: positions that a token attends to, its own included; None for all.
        tables: [batch slots, width] int32 block tables, at a fixed address.
    """

    def __init__(self, shape: AttentionShape, window: int | None, tables: Tensor) -> None:
        self._module = load("fa2", shape, window is not None)
        self._scale = shape.scale
        self._options = _options(window)
        self._entries = tables.view(-1)
        self._unused = torch.empty(16, dtype=torch.uint8, device=tables.device)

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
            self._module,
            (workspace, staged, plan),
            positions,
            (lse, _MASKS[is_causal], *self._options),
            self._scale,
            is_merged=results is not None,
        )


class Fa3Kernel:
    """FlashInfer's FA3 kernel, on Hopper. Takes the same arguments as ``Fa2Kernel``.

    With K and V of 8 bits, the queries of a launch are of 8 bits too.
    """

    def __init__(self, shape: AttentionShape, window: int | None, tables: Tensor) -> None:
        self._module = load("fa3", shape, window is not None)
        self._scale = shape.scale
        self._options = _options(window)
        self._entries = tables.view(-1)
        self._unused = torch.empty(16, dtype=torch.uint8, device=tables.device)

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
            self._module,
            (self._unused, staged, plan),
            positions,
            options,
            self._scale,
            is_merged=is_merged,
        )


def _options(window: int | None) -> tuple[Any, ...]:
    """Returns ``paged_run``'s arguments from ``layout`` to ``logits_soft_cap``, with custom masks off."""
    window_left, soft_cap = -1 if window is None else window - 1, 0.0
    # FlashInfer 0.6.12's FA2 kernel returns from padding before it waits for the previous kernel, so that the next
    # kernel could overtake both.
    has_early_start = False
    nothing = (None,) * 6
    return _NHD, window_left, has_early_start, *nothing, soft_cap
