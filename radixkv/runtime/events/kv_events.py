"""Cache events of a running loop."""

from __future__ import annotations

import time

import zmq

from radixkv.runtime.events.log import EventLog
from radixkv.runtime.events.messages import AllBlocksCleared, Event, EventBatch, encode_batch
from radixkv.runtime.events.publisher import EventPublisher

_MAX_SNAPSHOT_BLOCKS = 4096
"""Pages of one batch of a snapshot, which may end within no run of pages."""


class KVEvents:
    """Publishes what the tiers have got and lost, and sends snapshots to late subscribers.

    Args:
        log: of the loop's tiers.
        publisher: has published nothing yet. If its first number is not 0, an earlier runtime has published: then
            the first batch says that what that one had is gone.
        data_parallel_rank: number of the replica, which batches have.
    """

    def __init__(self, log: EventLog, publisher: EventPublisher, data_parallel_rank: int = 0) -> None:
        self._log = log
        self._publisher = publisher
        self._data_parallel_rank = data_parallel_rank
        if publisher.next_number:
            publisher.publish(self._batch(time.time(), [AllBlocksCleared()]))

    @property
    def replay_socket(self) -> zmq.Socket[bytes] | None:
        """Readable when a subscriber asks for something: call ``advance`` then."""
        return self._publisher.replay_socket

    @property
    def is_replaying(self) -> bool:
        """Whether a subscriber is to get more: call ``advance`` again soon."""
        return self._publisher.is_replaying

    def advance(self) -> None:
        """Publishes the changes since the last call as one batch, if there are any, then serves replays.

        O(1) if there is nothing to do, else O(pages that have changed); O(pages) for a snapshot. Never blocks.
        """
        if events := self._log.take():
            self._publisher.publish(self._batch(time.time(), events))
        self._publisher.serve_replays(self._take_snapshot)

    def _take_snapshot(self) -> list[bytes]:
        """Returns batches of which the first clears everything, so that applying them in order is enough."""
        batches: list[bytes] = []
        events: list[Event] = [AllBlocksCleared()]
        n_blocks, now = 0, time.time()
        for event in self._log.snapshot():
            events.append(event)
            n_blocks += len(event.block_hashes)
            if n_blocks >= _MAX_SNAPSHOT_BLOCKS:
                batches.append(self._batch(now, events))
                events, n_blocks = [], 0
        if events:
            batches.append(self._batch(now, events))
        return batches

    def _batch(self, now: float, events: list[Event]) -> bytes:
        return encode_batch(EventBatch(now, events, self._data_parallel_rank))
