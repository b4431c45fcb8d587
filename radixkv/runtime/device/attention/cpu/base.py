"""What the model needs of attention."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from radixkv.runtime.device.pack_cpu import Batch


class Attention(Protocol):
    """Causal attention over the paged pool."""

    def plan(self, batch: Batch) -> None:
        """Prepares a step: whatever does not depend on the layer."""
        ...

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Writes the step's K and V of one layer, then lets every token read its sequence up to itself, as far
        back as the layer's window reaches.

        Args:
            layer: index into the pool.
            q: [tokens, heads, head_dim].
            k: [tokens, kv_heads, head_dim].
            v: the same.

        Returns:
            [tokens, heads * head_dim].
        """
        ...
