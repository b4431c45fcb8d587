"""A frontend of a loop whose steps can have only some of the adapters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from radixkv.runtime.finished import wait_readable
from radixkv.wire.adapter_messages import ServedAdapter
from support.fake_adapters import fake_adapters
from support.loop_frontend import Frontend

DIGESTS = ("12ab", "34cd", "56ef", "78ab")
STEP_S = 0.1


class SlotFrontend(Frontend):
    """A frontend of a loop with adapters in slots. A copy ends before the turn after that which begins it."""

    def __init__(self, n_slots: int, digests: Sequence[str] = DIGESTS, **settings: object) -> None:
        served = [ServedAdapter(digest, digest, digest) for digest in digests]
        folders = {digest: digest for digest in digests}
        self.adapters = fake_adapters(*served, folders=folders, n_slots=n_slots, clock=lambda: self.now)
        self.slots = self.adapters._slots
        self.adapters_device = self.adapters._device
        super().__init__(adapters=self.adapters, **settings)
        self.device.step_s = STEP_S
        self.adapters_device.launched = self.launched

    def launched(self) -> set[str]:
        """Returns the digests of the rows of launched steps."""
        return {row.adapter for plan in self.scheduler.launched_plans for row, _ in plan.rows()}

    def turn(self, n_turns: int = 1) -> None:
        for _ in range(n_turns):
            if self.slots._thread is not None:
                wait_readable([self.slots.fileno()], 10.0)
            super().turn()
            self.check_slots()

    def check_slots(self) -> None:
        self.adapters_device.check_slots()
        queue = self.slots.queue
        assert queue._slots.keys() == self.adapters_device.in_slots
        in_line = [one for line in queue._lines.values() for one in line.requests.values()]
        assert not set(in_line) & set(queue)
        assert all(one.block_table is None and one.first_row is None for one in in_line)
        assert len(queue._unstarted) == queue._n_unstarted.total() == len(in_line)
        for digest, slot in queue._slots.items():
            assert slot.queued == Counter(one.sender for one in queue if one.adapter.digest == digest)
        for line in queue._lines.values():
            assert line.senders == Counter(one.sender for one in line.requests.values())

    def tokens(self, request_id: str) -> list[int]:
        return self.received[request_id].tokens.get(0, [])
