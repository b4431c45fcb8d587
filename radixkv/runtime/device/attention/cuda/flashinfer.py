"""FlashInfer's attention kernels, called with plans of our own.

What this relies on is not FlashInfer's public interface: the order of a plan's numbers and of ``paged_run``'s
arguments. ``checks.PACKAGES`` holds it to the releases where both were read and tested.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from radixkv.runtime.device.attention.cuda.work_items import RequestFields

_NHD = 0
_MASKS = {False: 0, True: 1}


@dataclass(frozen=True)
class Shape:
    """The heads of one layer, and how the pool holds them."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype

    @property
    def group(self) -> int:
        """Heads that share a KV head."""
        return self.n_heads // self.n_kv_heads


def load(backend: Literal["fa2", "fa3"], shape: Shape, is_windowed: bool) -> Any:
    """FlashInfer's module; compiles for minutes where it is not prebuilt."""
    from flashinfer.prefill import get_batch_prefill_module

    return get_batch_prefill_module(backend, *_module(shape, is_windowed))


def not_compiled(shape: Shape, windows: Sequence[int | None], capability: tuple[int, ...]) -> list[str]:
    """Names of the modules that ``load`` would have to compile for layers of these windows, on such a GPU."""
    from flashinfer.jit import gen_batch_prefill_module

    wanted = {(backend_of(capability), window is not None) for window in windows}
    specs = [gen_batch_prefill_module(backend, *_module(shape, windowed)) for backend, windowed in sorted(wanted)]
    return [spec.name for spec in specs if not spec.is_compiled]


def backend_of(capability: tuple[int, ...]) -> Literal["fa2", "fa3"]:
    """FA3 is Hopper's alone. Prompts and pages that many rows share have the same."""
    return "fa3" if capability == (9, 0) else "fa2"


def _module(shape: Shape, is_windowed: bool) -> tuple[Any, ...]:
    dtype, dim = shape.dtype, shape.head_dim
    return dtype, dtype, dtype, torch.int32, dim, dim, 0, is_windowed, False, False


@dataclass(frozen=True)
class Results:
    """Memory for results that are merged: FlashInfer's workspace, and the same as tensors.

    Args (of ``of``):
        n: results.
        by_member: whether the heads of one KV head are apart, as a ``TileKernel`` of items leaves them.
    """

    workspace: Tensor
    values: Tensor
    """[n, heads, head_dim]"""
    lse: Tensor
    """[n, heads] float32: log2 of each result's sum of exponentials."""
    head_steps: tuple[int, int]
    """How far the first heads of two KV heads are apart, and two heads of one KV head."""

    @classmethod
    def of(cls, n: int, shape: Shape, device: torch.device, *, by_member: bool = False) -> Results:
        """Allocates it."""
        numbers = n * shape.n_heads
        n_bytes = numbers * shape.head_dim * shape.dtype.itemsize
        workspace = torch.zeros(n_bytes + 4 * numbers, dtype=torch.uint8, device=device)
        values = workspace[:n_bytes].view(shape.dtype).view(n, shape.n_heads, shape.head_dim)
        lse = workspace[n_bytes:].view(torch.float32).view(n, shape.n_heads)
        return cls(workspace, values, lse, (1, shape.n_kv_heads) if by_member else (shape.group, 1))


@dataclass(frozen=True)
class Launch:
    """One call of a kernel with all that stays the same from layer to layer."""

    module: Any
    workspaces: tuple[Any, ...]
    positions: tuple[Any, ...]
    options: tuple[Any, ...]

    def __call__(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
        """Enqueues it.

        Args:
            q: [queries, heads, head_dim].
            k_cache, v_cache: [pages, page_size, kv_heads, head_dim].
            out: [queries, heads, head_dim], contiguous.
        """
        self.module.paged_run(*self.workspaces, q, k_cache, v_cache, *self.positions, out, *self.options)


class RequestKernel:
    """FlashInfer's FA2 kernel over work items.

    Args:
        shape: of the layer.
        window: positions that a token sees, its own included; None for all.
        tables: [slots, width] int32; stays where it is.
    """

    def __init__(self, shape: Shape, window: int | None, tables: Tensor) -> None:
        self._module = load("fa2", shape, window is not None)
        self._options = _options(shape, window)
        self._entries = tables.view(-1)
        self._unused = torch.empty(16, dtype=torch.uint8, device=tables.device)

    def launch(
        self,
        fields: RequestFields,
        numbers: Tensor,
        n_items: int,
        tile: int,
        *,
        results: Results | None = None,
        is_causal: bool = False,
    ) -> Launch:
        """A launch of items.

        Args:
            numbers: int32, where ``fields`` is staged on the device.
            n_items: the grid, padding included.
            tile: 16, 64 or 128 (query, head) pairs; no item has more.
            results: where the items' results go; None: to the launch's ``out``, and padding costs more.
            is_causal: whether an item's queries are the last positions of what it reads; else they see all of it.
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
            is_partial,  # FlashInfer's padding of a graph: the blocks that ``is_item`` rules out end at once
            is_partial,  # FlashInfer then merges as many queries as ``constants`` says: none
        ]
        positions = (
            numbers[fields.query_indptr :],
            numbers[fields.page_indptr : fields.page_indptr + 2 * fields.capacity + 1],
            self._entries,
            numbers[fields.last_page_lens :],
        )
        workspace = self._unused if results is None else results.workspace
        return Launch(
            self._module, (workspace, numbers, plan), positions, (None, _MASKS[is_causal], *self._options)
        )


class TileKernel:
    """FlashInfer's FA3 kernel, on Hopper. Arguments as ``RequestKernel``'s."""

    def __init__(self, shape: Shape, window: int | None, tables: Tensor) -> None:
        self._module = load("fa3", shape, window is not None)
        self._options = _options(shape, window)
        self._entries = tables.view(-1)
        self._unused = torch.empty(16, dtype=torch.uint8, device=tables.device)

    def launch(
        self, numbers: Tensor, plan: list[int], *, is_causal: bool = True, lse: Tensor | None = None
    ) -> Launch:
        """A launch of tiles.

        Args:
            numbers: int32 on the device: the arrays of a ``TileSchedule`` or ``TileFields``, whose ``plan`` it is.
            is_causal: whether a tile's queries are the last positions of what it reads; else they see all of it.
            lse: [queries, heads] float32, filled with log2 of each one's sum of exponentials.
        """
        positions = (numbers, numbers, self._entries, numbers)
        options = (lse, _MASKS[is_causal], *self._options)
        return Launch(self._module, (self._unused, numbers, plan), positions, options)


def _options(shape: Shape, window: int | None) -> tuple[Any, ...]:
    """From ``layout`` on; nothing is masked, scaled or rotated."""
    window_left, soft_cap = -1 if window is None else window - 1, 0.0
    # FlashInfer 0.6.12's FA2 kernel returns from padding before it waits for the kernel ahead of it, so that the
    # next one could pass both.
    has_early_start = False
    nothing = (None,) * 6
    return (
        _NHD,
        window_left,
        has_early_start,
        *nothing,
        soft_cap,
        shape.head_dim**-0.5,
        *nothing[:3],
        1.0,
        1e4,
        0,
        0,
    )
