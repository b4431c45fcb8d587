"""The states of recurrent layers on the CPU device."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch

from radixkv.runtime.device.memory.state_positions import StatePositions
from radixkv.runtime.device.memory.state_size import state_bytes
from radixkv.runtime.device.memory_check import check_allocation
from radixkv.runtime.device.model_config.states import RecurrentConfig
from radixkv.runtime.device.ops.base import LayerStates, TokenSpan
from radixkv.runtime.step.plan import StateSave, StepPlan


class RecurrentStates:
    """States of all recurrent layers as ``layers``: a set for each batch slot, then one for each slot of the tree.

    Memory: what ``state_bytes`` says for each set.

    Args:
        config: of the delta nets.
        n_batch_slots: number of batch slots.
        n_tree_slots: number of slots of the tree.
        dtype: of activations.

    Raises:
        ConfigError: the states do not fit into memory.
    """

    def __init__(self, config: RecurrentConfig, n_batch_slots: int, n_tree_slots: int, dtype: torch.dtype) -> None:
        n_layers, n_slots = len(config.layers), n_batch_slots + n_tree_slots
        with check_allocation(
            n_slots * state_bytes(config, dtype),
            f"the states of recurrent layers for max_num_seqs {n_batch_slots} and {n_tree_slots} slots of the tree",
            "set max_num_seqs or state_memory_bytes lower",
        ):
            # Written, not only reserved: the pool is checked against what is left.
            inputs = torch.empty(n_layers, n_slots, config.n_taps - 1, config.n_channels, dtype=dtype).zero_()
            memory = torch.empty(n_layers, n_slots, config.n_value_heads, config.key_dim, config.value_dim).zero_()
        self.layers = [LayerStates(*one) for one in zip(inputs, memory, strict=True)]
        """States of each delta net."""
        self.n_bytes = state_bytes(config, dtype)
        """Bytes of a slot."""
        self.n_tree_slots = n_tree_slots
        """Number of slots of the tree."""
        self._n_batch_slots = n_batch_slots
        self._positions = StatePositions(n_batch_slots, n_tree_slots)

    def position(self, slot: int) -> int:
        """See ``StatePositions.position``."""
        return self._positions.position(slot)

    def set_position(self, slot: int, position: int) -> None:
        """See ``StatePositions.set_position``."""
        self._positions.set_position(slot, position)

    def parts(self, slot: int) -> Iterator[torch.Tensor]:
        """Yields what a slot of the tree has: contiguous views, in the same order for each slot. O(layers)."""
        index = self._n_batch_slots + slot
        for layer in self.layers:
            yield layer.memory[index]
            yield layer.inputs[index]

    def check(self, plan: StepPlan) -> None:
        """See ``StatePositions.check``."""
        self._positions.check(plan)

    def load(self, plan: StepPlan) -> None:
        """Copies the states that batch slots of a step go on from. O(bytes)."""
        loads = ((self._n_batch_slots + slot, batch_slot) for slot, batch_slot in plan.state_loads)
        for source, batch_slot in chain(plan.state_forks, loads):
            for layer in self.layers:
                layer.inputs[batch_slot] = layer.inputs[source]
                layer.memory[batch_slot] = layer.memory[source]

    def token_spans(self, plan: StepPlan) -> tuple[TokenSpan, ...]:
        """Returns the rows of a step as parts of its tokens, which end where states are saved. O(rows + states)."""
        saves: dict[int, list[StateSave]] = {}
        for save in plan.state_saves:
            saves.setdefault(save.batch_slot, []).append(save)
        spans: list[TokenSpan] = []
        first = 0
        for row in plan.rows:
            start, last = row.start, row.start + row.n_tokens
            for _, position, slot in saves.get(row.batch_slot, ()):
                spans.append(TokenSpan(row.batch_slot, first, position - start, start, self._n_batch_slots + slot))
                first, start = first + position - start, position
            if start < last:
                spans.append(TokenSpan(row.batch_slot, first, last - start, start))
                first += last - start
        return tuple(spans)
