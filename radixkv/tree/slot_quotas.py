"""Which group has each slot of a tree's states, and whose states give way to whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from radixkv.errors import InvariantError
from radixkv.tree.node import State


class SlotQuotas:
    """Divides slots among groups: how many others leave to a group, and how many it has at most. O(1) each."""

    def __init__(self) -> None:
        self._groups: dict[int, str] = {}
        """The group that has each taken slot."""
        self._n_of: Counter[str] = Counter()
        """How many slots each group has."""
        self._floors: Mapping[str, int] = {}
        self._caps: Mapping[str, int] = {}

    def divide(self, floors: Mapping[str, int], caps: Mapping[str, int]) -> None:
        """Sets floors and caps; groups that are not named have neither."""
        self._floors, self._caps = floors, caps

    def n_of(self, group: str) -> int:
        """Returns how many slots a group has."""
        return self._n_of[group]

    def is_at_cap(self, group: str) -> bool:
        """Returns whether a group has as many slots as it may have."""
        return group in self._caps and self._n_of[group] >= self._caps[group]

    def may_take(self, group: str, slot: int) -> bool:
        """Returns whether the state in a slot may give way to one of a group: if it is of the same group or, while
        the group is below its cap, of one with more slots than its floor."""
        owner = self._groups[slot]
        return owner == group or not (self.is_at_cap(group) or self._n_of[owner] <= self._floors.get(owner, 0))

    def take(self, slot: int, group: str) -> None:
        """Notes that a group has a slot from now on."""
        self._groups[slot] = group
        self._n_of[group] += 1

    def give_back(self, slot: int) -> None:
        """Notes that nobody has a slot any more."""
        self._n_of[self._groups.pop(slot)] -= 1

    def check(self, n_taken: int, states: Iterable[State]) -> None:
        """Recounts what each group has. O(slots).

        Args:
            n_taken: taken slots.
            states: those in the tree.

        Raises:
            InvariantError: a bug in radixkv.
        """
        n_of = Counter(self._groups.values())
        if n_of != self._n_of or n_of.total() != n_taken:
            raise InvariantError(f"groups have {n_of} slots of states, and {self._n_of} were counted")
        if any(
            state.node is not None and state.node.namespace.group != self._groups[state.slot] for state in states
        ):
            raise InvariantError("the slot of a state is counted for another group")
        if any(n_of[group] > cap for group, cap in self._caps.items()):
            raise InvariantError(f"groups have {n_of} slots of states, more than their caps {self._caps}")
