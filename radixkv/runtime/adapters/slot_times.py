"""How long each sender has had slots of adapters, while others waited for one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping


class SlotTimes:
    """The slot time of each sender: seconds for which its requests had slots, divided by its weight.

    The sender with the least of it has the next turn. A sender that neither waits nor has a turn saves nothing up:
    its time is at least that of the one with the least of those who wait. ``forget`` is called when nobody waits.

    Args:
        weights: of the senders, in whose proportion they get slots while they wait for each other.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._times = dict.fromkeys(weights, 0.0)

    @property
    def has_one_sender(self) -> bool:
        """Whether there is one sender at most, so that no time matters."""
        return len(self._weights) < 2

    def forget(self) -> None:
        """Makes the times of all senders equal. O(senders)."""
        self._times = dict.fromkeys(self._weights, 0.0)

    def charge(self, senders: Iterable[str], seconds: float) -> None:
        """Adds the time for which a slot had requests of these senders, all of it to one of them. O(senders).

        It is the one whose time is then the least. Those who have had less than that are raised to it. Others pay
        nothing: else who shares a slot in turns of others might never have the least, and so no turn of its own.
        """
        charged = {sender: self._times[sender] + seconds / self._weights[sender] for sender in senders}
        level = min(charged.values(), default=0.0)
        for sender in charged:
            self._times[sender] = max(self._times[sender], level)

    def raise_others(self, *, waiting: Collection[str], served: Collection[str]) -> None:
        """Raises the times of those who neither wait nor have a turn to the least time of those who wait.

        O(senders).
        """
        least = self.least(waiting)
        for sender, time in self._times.items():
            if time < least and sender not in waiting and sender not in served:
                self._times[sender] = least

    def copy(self) -> SlotTimes:
        """Returns other times, equal to these. O(senders)."""
        copied = SlotTimes(self._weights)
        copied._times = dict(self._times)
        return copied

    def least(self, senders: Iterable[str]) -> float:
        """Returns the slot time of the one who has the least of it; 0 for no senders."""
        return min((self._times.get(sender, 0.0) for sender in senders), default=0.0)

    def most(self, senders: Iterable[str]) -> float:
        """Returns the slot time of the one who has the most of it; 0 for no senders."""
        return max((self._times.get(sender, 0.0) for sender in senders), default=0.0)
