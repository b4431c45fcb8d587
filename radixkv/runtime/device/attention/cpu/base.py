"""The attention interface that the CPU model calls."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from radixkv.runtime.device.pack_cpu import PackedStep


class Attention(Protocol):
    """Causal attention over the paged KV pool."""

    def plan(self, step: PackedStep) -> None:
        """Prepares everything of a step that does not depend on the layer."""
        ...

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Writes K and V of one layer, then computes causal attention of every token over its sequence.

        A layer with a sliding window reads only the positions within the window.

        Args:
            layer: index of the layer in the pool.
            q: [tokens, heads, head_dim].
            k: [tokens, kv_heads, head_dim].
            v: [tokens, kv_heads, head_dim].

        Returns:
            [tokens, heads * head_dim].
        """
        ...
