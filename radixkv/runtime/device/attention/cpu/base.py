"""Attention on the CPU, as the executor uses it."""

from __future__ import annotations

from typing import Protocol

from radixkv.runtime.device.attention.base import LayerAttention
from radixkv.runtime.device.pack_cpu import PackedStep


class Attention(LayerAttention, Protocol):
    """Causal attention over the paged KV pool."""

    def plan(self, step: PackedStep) -> None:
        """Prepares everything of a step that does not depend on the layer."""
        ...
