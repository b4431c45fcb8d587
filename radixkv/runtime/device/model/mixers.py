"""What mixes the tokens of a decoder's layers: attention, or the scan of a layer with states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from radixkv.runtime.device.attention.base import LayerAttention
from radixkv.runtime.device.model.activations import Activations
from radixkv.runtime.device.ops.base import (
    LayerStates,
    Linear,
    RecurrentLayer,
    RotateAndStore,
    Rows,
    Sequences,
    TokenInputs,
)


class LayerCaches(Protocol):
    """The KV pool, as the decoder uses it."""

    @property
    def layers(self) -> Sequence[tuple[Tensor, Tensor]]:
        """K and V that each layer with attention reads."""
        ...

    @property
    def states(self) -> Sequence[LayerStates]:
        """States of each recurrent layer."""
        ...


class Mixer(Protocol):
    """What mixes tokens in a layer. Only ``run`` depends on which tokens belong together."""

    def prepare(self, normed: Rows, activations: Activations, inputs: TokenInputs, pool: LayerCaches) -> None:
        """Stores what ``run`` reads, in ``activations`` and in the pool. ``normed`` is [tokens, hidden]."""
        ...

    def run(
        self, activations: Activations, pool: LayerCaches, attention: LayerAttention, sequences: Sequences
    ) -> None:
        """Mixes tokens. See ``Decoder.mix``."""
        ...

    def output(self, activations: Activations) -> Tensor:
        """Returns what the projection of the layer's output reads, [tokens, size]."""
        ...


@dataclass(frozen=True)
class AttentionMixer(Mixer):
    """A layer's attention, with what comes before it."""

    index: int
    """Of the attention."""
    head_dim: int
    query_key_value: Linear
    rotate_and_store: RotateAndStore
    output_gate: Linear | None
    sinks: Tensor | None
    has_window: bool
    gated: Callable[[Tensor, Tensor], Tensor]
    """See ``Operations.gated``."""

    def prepare(self, normed: Rows, activations: Activations, inputs: TokenInputs, pool: LayerCaches) -> None:
        """Stores K and V in the pool, and rotated queries and gates in ``activations``."""
        if self.has_window and inputs.in_windows is not None:
            inputs = inputs.in_windows
        q = activations.with_heads(self.head_dim).q
        self.rotate_and_store(self.query_key_value(normed), inputs, *pool.layers[self.index], q)
        if self.output_gate is not None:
            self.output_gate(normed, activations.gate)

    def run(
        self, activations: Activations, pool: LayerCaches, attention: LayerAttention, sequences: Sequences
    ) -> None:
        """See ``Mixer``."""
        heads = activations.with_heads(self.head_dim)
        attention.run(self.index, heads.q, *pool.layers[self.index], heads.attention_out)

    def output(self, activations: Activations) -> Tensor:
        """See ``Mixer``."""
        attended = activations.with_heads(self.head_dim).attention_out.flatten(1)
        return attended if activations.gate is None else self.gated(attended, activations.gate)


@dataclass(frozen=True)
class StateMixer(Mixer):
    """A gated delta net or a layer of Mamba2 among a layer's parts."""

    index: int
    """Of the layer among those with states, counted from 0."""
    layer: RecurrentLayer

    def prepare(self, normed: Rows, activations: Activations, inputs: TokenInputs, pool: LayerCaches) -> None:
        """See ``Mixer``."""
        assert activations.projected is not None, "empty_activations allocates them"
        self.layer.project(normed, activations.projected)

    def run(
        self, activations: Activations, pool: LayerCaches, attention: LayerAttention, sequences: Sequences
    ) -> None:
        """See ``Mixer``."""
        projected, read = self._parts(activations)
        self.layer.scan(projected, sequences, pool.states[self.index], read)

    def output(self, activations: Activations) -> Tensor:
        """See ``Mixer``."""
        return self.layer.finish(*self._parts(activations))

    def _parts(self, activations: Activations) -> tuple[Tensor, Tensor]:
        assert activations.projected is not None, "empty_activations allocates them"
        assert activations.read is not None, "empty_activations allocates them"
        return activations.projected[: len(activations.read)], activations.read
