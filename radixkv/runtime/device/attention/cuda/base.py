"""What decoder and runner need of attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from torch import Tensor

from radixkv.runtime.device.attention.cuda.decode_tiles import Variant
from radixkv.runtime.device.attention.cuda.work_items import Ints
from radixkv.runtime.device.staging_cuda import Staged, Staging
from radixkv.runtime.step.plan import SharedRun

DecodeT = TypeVar("DecodeT")
PromptT = TypeVar("PromptT")


class LayerAttention(Protocol):
    """Attention of a planned step."""

    def run(self, layer: int, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
        """Every token reads its sequence up to itself; the step's own K and V are stored already.

        Args:
            layer: its index.
            q: [tokens, heads, head_dim], rotated.
            k_cache: [pages + 1, page_size, kv_heads, head_dim] of the layer.
            v_cache: the same.
            out: [tokens, heads, head_dim], filled.
        """
        ...


class Attention(Protocol[DecodeT, PromptT]):
    """Plans steps over the paged pool. What its plans are is its own affair, but that those of a bucket have the
    ``variant`` and ``n_rows`` of a graph.

    Decode rows, of one token each, come first in a batch.
    """

    def connect(self, staging: Staging, tables: Tensor) -> None:
        """Binds the device's memory.

        Args:
            staging: of the complete layout.
            tables: [max_rows + 1, width] int32; stays where it is.
        """
        ...

    def variants(self, bucket: int) -> Sequence[Variant]:
        """The ways in which a bucket's graph may compute; none if steps are not to be captured."""
        ...

    def plan_decode(
        self,
        staged: Staged,
        batch_slots: Ints,
        lengths: Ints,
        shared: Sequence[SharedRun] = (),
        bucket: int | None = None,
        variant: Variant | None = None,
    ) -> DecodeT:
        """A step's decode rows, before ``staged`` is sent.

        Args:
            slots: [rows].
            lengths: [rows], positions that each row reads, its own included.
            shared: what rows share, see ``StepPlan.shared``.
            bucket: rows of the graph that will run; None runs without a graph.
            variant: that of the graph; None for the best.
        """
        ...

    def plan_prompts(self, batch_slots: Ints, starts: Ints, n_tokens: Ints) -> PromptT:
        """A step's other rows.

        Args:
            slots, starts, n_tokens: [rows]; a row's tokens follow on those of the row before it.
        """
        ...

    def step(self, decode: DecodeT | None, prompts: PromptT | None) -> LayerAttention:
        """The planned step, as the decoder runs it."""
        ...
