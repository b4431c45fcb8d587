"""The states of gated delta nets on the CPU device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from radixkv.errors import InvariantError
from radixkv.runtime.device.memory_check import check_allocation
from radixkv.runtime.device.model_config.config import DeltaNetConfig
from radixkv.runtime.device.ops.base import LayerStates, TokenSpan


class RecurrentStates:
    """States of all gated delta nets, one set for each batch slot, as ``layers``.

    Memory: what ``state_bytes`` says for each batch slot.

    Args:
        config: of the delta nets.
        n_slots: number of batch slots.
        dtype: of activations.

    Raises:
        ConfigError: the states do not fit into memory.
    """

    def __init__(self, config: DeltaNetConfig, n_slots: int, dtype: torch.dtype) -> None:
        n_layers = len(config.layers)
        with check_allocation(
            n_slots * state_bytes(config, dtype),
            f"the states of gated delta nets for max_num_seqs {n_slots}",
            "set max_num_seqs lower",
        ):
            # Written, not only reserved: the pool is checked against what is left.
            inputs = torch.empty(n_layers, n_slots, config.n_taps - 1, config.n_channels, dtype=dtype).zero_()
            memory = torch.empty(n_layers, n_slots, config.n_value_heads, config.key_dim, config.value_dim).zero_()
        self.layers = [LayerStates(*one) for one in zip(inputs, memory, strict=True)]
        """States of each delta net."""
        self._ends = [0] * n_slots

    def check(self, rows: Sequence[TokenSpan]) -> None:
        """Checks that each row starts where its slot's states end, and notes where they will. O(rows).

        Raises:
            InvariantError: a row would continue from states of another position.
        """
        for row in rows:
            end = self._ends[row.batch_slot]
            if row.start not in (0, end):
                raise InvariantError(
                    f"a row of batch slot {row.batch_slot} starts at position {row.start}, and the slot's states "
                    f"are of {end}"
                )
            self._ends[row.batch_slot] = row.start + row.n_tokens


def state_bytes(config: DeltaNetConfig, dtype: torch.dtype) -> int:
    """Returns the bytes of one sequence's states."""
    n_inputs = (config.n_taps - 1) * config.n_channels
    n_memory = config.n_value_heads * config.key_dim * config.value_dim
    return len(config.layers) * (n_inputs * dtype.itemsize + n_memory * torch.float32.itemsize)
