"""The positions in their sequences that the states of recurrent layers belong to."""

from __future__ import annotations

from radixkv.errors import InvariantError
from radixkv.runtime.step.plan import StepPlan


class StatePositions:
    """Where the states of each slot will be after the steps that were launched.

    Args:
        n_batch_slots: number of batch slots.
        n_tree_slots: number of slots of the tree.
    """

    def __init__(self, n_batch_slots: int, n_tree_slots: int) -> None:
        self._n_batch_slots = n_batch_slots
        self._ends = [0] * (n_batch_slots + n_tree_slots)

    def check(self, plan: StepPlan) -> None:
        """Checks that each row starts where its slot's states end, and notes where they will. O(rows).

        Raises:
            InvariantError: a row would continue from states of another position.
        """
        for source, batch_slot in plan.state_forks:
            self._ends[batch_slot] = self._ends[source]
        for slot, batch_slot in plan.state_loads:
            self._ends[batch_slot] = self._ends[self._n_batch_slots + slot]
        for row in plan.rows:
            end = self._ends[row.batch_slot]
            if row.start not in (0, end):
                raise InvariantError(
                    f"a row of batch slot {row.batch_slot} starts at position {row.start}, and the slot's states "
                    f"are of {end}"
                )
            self._ends[row.batch_slot] = row.start + row.n_tokens
        for _, position, slot in plan.state_saves:
            self.set_position(slot, position)

    def position(self, slot: int) -> int:
        """Returns the position of what a slot of the tree has. O(1)."""
        return self._ends[self._n_batch_slots + slot]

    def set_position(self, slot: int, position: int) -> None:
        """Notes the position of what was copied to a slot of the tree. O(1)."""
        self._ends[self._n_batch_slots + slot] = position
