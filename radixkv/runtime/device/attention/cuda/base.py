"""Attention on CUDA, as the model runner uses it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from radixkv.runtime.device.attention.base import LayerAttention
from radixkv.runtime.device.attention.cuda.decode_tiles import Variant
from radixkv.runtime.device.attention.cuda.work_items import Ints
from radixkv.runtime.device.kv_dtype import LayerScales
from radixkv.runtime.device.memory.cuda.staging import Staging, StagingBuffer
from radixkv.runtime.step.plan import SharedRun

DecodeT = TypeVar("DecodeT")
PromptT = TypeVar("PromptT")


@dataclass(frozen=True)
class AttentionShape:
    """Head counts, head size, page size, dtypes and scale of a layer's attention."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    """Dtype of queries and outputs."""
    scale: float
    """Multiplier of the scores."""
    kv_dtype: torch.dtype
    """Dtype of K and V: ``dtype``, or ``float8_e4m3fn``."""

    @property
    def group(self) -> int:
        """Heads that share a KV head."""
        return self.n_heads // self.n_kv_heads

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token in one layer."""
        return 2 * self.n_kv_heads * self.head_dim * self.kv_dtype.itemsize


@dataclass(frozen=True)
class Geometry:
    """The sizes of model and GPU that planning depends on."""

    shape: AttentionShape
    large_tile: int
    """(Query, head) pairs of one KV head that fit a large tile, which FlashInfer computes; 0 without FlashInfer."""
    n_processors: int
    """Multiprocessors of the GPU."""
    shared_bytes: int
    """Shared memory per multiprocessor."""
    min_small_tile: int = 16
    """Fewest pairs that fit a small tile: 16, 32 or 64."""

    @cached_property
    def small_tile(self) -> int:
        """(Query, head) pairs of one KV head that fit a small tile, which the decode kernel computes."""
        return next(tile for tile in (16, 32, 64) if tile >= max(self.shape.group, self.min_small_tile))

    def for_extend(self) -> Geometry:
        """Returns the geometry of rows with several tokens: small tiles are wide, and there are no large ones."""
        return replace(self, large_tile=0, min_small_tile=64 if self.shape.head_dim <= 128 else 32)

    @cached_property
    def small_rows(self) -> int:
        """Rows that fit a small tile."""
        return self.small_tile // self.shape.group

    @cached_property
    def large_rows(self) -> int:
        """Rows that fit a large tile."""
        return self.large_tile // self.shape.group

    def items_at_once(self, blocks: int) -> int:
        """Returns how many items give each multiprocessor ``blocks`` thread blocks."""
        return max(blocks * self.n_processors // self.shape.n_kv_heads, 1)


class LayerTensors(NamedTuple):
    """What attention of a layer reads and writes for some rows of a step."""

    q: Tensor
    """[tokens, heads, head_dim]."""
    k_cache: Tensor
    """[pages, page_size, kv_heads, head_dim], as is ``v_cache``, with the same strides; a token is contiguous.
    FlashInfer's kernels need contiguous pages, Triton's read tokens at any equal distance."""
    v_cache: Tensor
    out: Tensor
    """[tokens, heads, head_dim], contiguous."""
    scales: LayerScales
    """Scales of K and V."""
    sinks: Tensor | None
    """Sinks of the heads, as for ``sinks.apply_sinks``; None for a layer without."""


LayerLaunch = Callable[[LayerTensors], None]
"""Enqueues planned attention of a layer."""


class DecodeRows(NamedTuple):
    """The decode rows of a step: one for each token, also for each draft and each token of a short prompt."""

    batch_slots: Ints
    """[rows]."""
    lengths: Ints
    """[rows], positions that each row attends to, its own included."""
    shared: Sequence[SharedRun] = ()
    """Runs of shared pages by the rows of the plan, see ``StepPlan.shared_runs``."""
    runs_id: int | None = None
    """Number of ``shared``, see ``StepPlan.runs_id``; None: it has none."""
    counts: Ints | None = None
    """[rows of the plan]: consecutive rows of each, its tokens; None: one each."""


class AttentionPlanner(Protocol[DecodeT, PromptT]):
    """Plans steps over the paged pool.

    Plans are opaque to callers, but with ``variants``, a decode plan has the ``variant`` and ``n_rows`` that select
    its graph. Decode rows, of one token each, come first in a step.
    """

    def connect(self, staging: Staging, tables: Tensor, window_tables: Tensor | None = None) -> None:
        """Binds device memory.

        Args:
            staging: of the layout with all fields added.
            tables: [max_rows + 1, width] int32 block tables, at a fixed address.
            window_tables: the same of layers with windows, which have pages of their own. Their entries have the
                same positions, and those behind the window are stale. None: all layers are in the same pages.
        """
        ...

    def variants(self, bucket: int) -> Sequence[Variant]:
        """Returns the variants to capture for a bucket; none if attention does not support graphs."""
        ...

    def fits_prompts(self, starts: Ints, n_tokens: Ints) -> bool:
        """Whether prompt rows can be computed as decode rows, in about the time of the kernels of prompts.

        Args:
            starts: [rows], position of each row's first token.
            n_tokens: [rows].
        """
        ...

    def plan_decode(
        self,
        staged: StagingBuffer,
        rows: DecodeRows,
        bucket: int | None = None,
        variant: Variant | None = None,
    ) -> DecodeT:
        """Plans a step's decode rows, and stages the plan; called before ``staged`` is sent.

        Args:
            staged: the step's staging buffer.
            rows: the rows, without padding.
            bucket: rows of the graph that will run; None runs without a graph.
            variant: variant of the graph; None chooses the fastest.
        """
        ...

    def plan_prompts(self, batch_slots: Ints, starts: Ints, n_tokens: Ints) -> PromptT:
        """Plans a step's prompt rows. The tokens of consecutive rows are consecutive.

        Args:
            batch_slots: [rows].
            starts: [rows], position of each row's first token.
            n_tokens: [rows].
        """
        ...

    def step(self, decode: DecodeT | None, prompts: PromptT | None) -> LayerAttention:
        """Returns attention of the planned step."""
        ...
