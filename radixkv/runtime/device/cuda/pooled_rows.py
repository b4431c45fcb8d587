"""What the rows of a step report of their prompts' last positions, copied to the host behind the step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from radixkv.runtime.device.cuda.model_runner import StepOutputs
from radixkv.runtime.device.memory.cuda.array_copies import to_device, to_host
from radixkv.runtime.device.pack import PackedStep
from radixkv.wire.messages import Pooling


class PooledRows:
    """The hidden states and logits that rows report. Constructing it enqueues their copy on the current stream.

    Args:
        step: with at least one row that has ``Row.pooling``.
        outputs: of the step; with ``last`` if a row reports its hidden state.
    """

    def __init__(self, step: PackedStep, outputs: StepOutputs) -> None:
        firsts, results = step.plan.first_positions(), step.results
        rows: list[tuple[int, int, Pooling]] = []
        for index, row in enumerate(step.plan.rows):
            if row.pooling is not None:
                position = firsts[index]
                rows.append((index, position if results is None else int(results[position]), row.pooling))
        self._states = [index for index, _, pooling in rows if not pooling.token_ids]
        self._scores = [(index, len(pooling.token_ids)) for index, _, pooling in rows if pooling.token_ids]
        self._state_values = self._score_values = torch.empty(0)
        device = outputs.logits.device
        if self._states:
            assert outputs.last is not None, "steps with pooled states run without a decode graph"
            places = _indices([place for _, place, pooling in rows if not pooling.token_ids], device)
            self._state_values = to_host(outputs.last.index_select(0, places).float())
        if self._scores:
            pairs = [(place, token) for _, place, pooling in rows for token in pooling.token_ids]
            places, tokens = (_indices(values, device) for values in zip(*pairs, strict=True))
            self._score_values = to_host(outputs.logits[places, tokens].float())

    def collect(self) -> dict[int, bytes]:
        """Returns the float32 values by row. Call it once the device has finished the step. O(values)."""
        found = {
            row: values.numpy().tobytes() for row, values in zip(self._states, self._state_values, strict=True)
        }
        first = 0
        for row, n in self._scores:
            found[row] = self._score_values[first : first + n].numpy().tobytes()
            first += n
        return found


def _indices(values: Sequence[int], device: torch.device) -> Tensor:
    return to_device(np.array(values, dtype=np.int64), device)
