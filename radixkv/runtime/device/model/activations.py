"""The activations of a step's tokens between the kernels of a decoder."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from radixkv.runtime.device.ops.base import padded_rows


@dataclass(frozen=True)
class Activations:
    """Activations of a step's tokens between kernels."""

    residual: Tensor
    """[tokens, hidden]: the residual stream."""
    q: Tensor
    """[tokens, heads, head_dim]: rotated queries of the next attention."""
    attention_out: Tensor
    """[tokens, heads, head_dim]: output of attention."""
    gate: Tensor | None
    """[tokens, heads * head_dim]: what the output is multiplied by, before a sigmoid; None: there is no gate."""
    layer_inputs: Tensor | None = None
    """[tokens, layers, size]: what each layer has beside the residual stream; None: there is nothing."""
    projected: Tensor | None = None
    """[``padded_rows(tokens)``, inputs]: inputs of the next layer with states; None: there is none."""
    read: Tensor | None = None
    """[tokens, value heads * value_dim]: what a layer's tokens have read of its states."""

    def first(self, n_tokens: int) -> Activations:
        """Returns views of the first ``n_tokens`` tokens."""
        first, projected = self._each(lambda x: x[:n_tokens]), self.projected
        return first if projected is None else replace(first, projected=projected[: padded_rows(n_tokens)])

    def of_tokens(self, indices: Tensor) -> Activations:
        """Returns copies of the activations of some tokens, [n] int32. Outputs of attention are zero."""
        some = self._each(lambda x: x.index_select(0, indices))
        return replace(some, attention_out=torch.zeros_like(some.q))

    def _each(self, part: Callable[[Tensor], Tensor]) -> Activations:
        return replace(self, **{name: part(x) for name, x in vars(self).items() if x is not None})

    def with_heads(self, head_dim: int) -> Activations:
        """Returns views whose queries and outputs have heads of a size, at most that of these."""
        n_tokens, n_heads, size = self.q.shape
        if head_dim == size:
            return self
        shape = (n_tokens, n_heads, head_dim)
        q, out = (x.flatten()[: math.prod(shape)].view(shape) for x in (self.q, self.attention_out))
        return replace(self, q=q, attention_out=out)
