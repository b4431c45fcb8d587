"""Random histories of engines whose events several subscribers follow, as a Hypothesis state machine."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from radixkv.runtime.events.kv_events import KVEvents
from radixkv.runtime.events.log import EventLog
from radixkv.settings.config import WritePolicy
from support.actions import Actions
from support.engine_machine import DiskEngineMachine, small
from support.replica import Replica, blocks_of

N_BUFFERED = 12
"""Batches that the feed can replay."""


@dataclass
class Feed:
    """Takes the place of the publisher: numbers batches, and keeps the last ones for replays."""

    batches: list[bytes] = field(default_factory=list)
    replay_socket: None = None
    snapshot: list[bytes] = field(default_factory=list)
    """That after the last batch, if the last turn was asked for one."""
    wants_snapshot: bool = False

    @property
    def next_number(self) -> int:
        return len(self.batches)

    def publish(self, batch: bytes) -> None:
        self.batches.append(batch)

    def serve_replays(self, take_snapshot: object) -> None:
        assert callable(take_snapshot)
        if self.wants_snapshot:
            self.snapshot, self.wants_snapshot = take_snapshot(), False


@dataclass
class Subscriber:
    """Follows a feed as docs/events.md tells subscribers to."""

    replica: Replica = field(default_factory=Replica)
    n_applied: int = 0
    """Number of the next batch."""
    n_snapshots: int = 0

    def catch_up(self, feed: Feed, take_snapshot: object) -> None:
        """Applies what the feed can replay, or else a snapshot."""
        assert callable(take_snapshot)
        if self.n_applied < len(feed.batches) - N_BUFFERED:
            self.n_snapshots += 1
            for batch in take_snapshot():
                self.replica.apply(batch)
        else:
            for batch in feed.batches[self.n_applied :]:
                self.replica.apply(batch)
        self.n_applied = len(feed.batches)


class PublishingMachine(DiskEngineMachine):
    """An engine with three tiers, the first subscriber of its events, one that misses batches, and late ones."""

    @initialize(
        page_size=st.sampled_from((1, 2, 4)),
        n_slots=st.sampled_from((0, 12, 60)),
        write_policy=st.sampled_from(("through", "selective")),
    )
    def start(self, page_size: int, n_slots: int, write_policy: WritePolicy) -> None:  # type: ignore[override]
        self.actions = Actions(
            40, page_size, n_slots=n_slots or 60, has_disk=bool(n_slots), write_policy=write_policy
        )
        engine = self.actions.engine
        self.feed = Feed()
        self.log = EventLog(engine.cache, engine.scheduler.tiers.changes(), shows_salted_tokens=True)
        self.events = KVEvents(self.log, self.feed)  # type: ignore[arg-type]
        self.first, self.lossy = Subscriber(), Subscriber()

    def take_snapshot(self) -> list[bytes]:
        self.feed.wants_snapshot = True
        self.events.advance()
        return self.feed.snapshot

    @invariant()
    def the_first_subscriber_knows_all(self) -> None:
        if not hasattr(self, "events"):
            return
        self.events.advance()
        self.first.catch_up(self.feed, self.take_snapshot)
        assert self.first.n_snapshots == 0
        self.check(self.first)

    def check(self, subscriber: Subscriber) -> None:
        expected, known = blocks_of(self.actions.engine), subscriber.replica.blocks
        assert (known["GPU"], known["CPU"]) == (expected["GPU"], expected["CPU"])
        # Pages are announced in the turn that takes the end of their write.
        assert known["STORAGE"].items() <= expected["STORAGE"].items()

    @precondition(lambda self: len(self.feed.batches) > 3)
    @rule()
    def catch_up_after_a_gap(self) -> None:
        self.lossy.catch_up(self.feed, self.take_snapshot)
        self.check(self.lossy)
        assert self.lossy.replica == self.first.replica

    @rule(which=small)
    def subscribe_late(self, which: int) -> None:
        """Starts with a snapshot, or with a replay if all is in the buffer yet."""
        late = Subscriber()
        if which % 2:
            for batch in self.take_snapshot():
                late.replica.apply(batch)
            late.n_applied = len(self.feed.batches)
        late.catch_up(self.feed, self.take_snapshot)
        assert late.replica == self.first.replica

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "events") and self.actions.engine.scheduler.is_idle:
            self.actions.engine.scheduler.tiers.advance()
            self.the_first_subscriber_knows_all()
            assert self.first.replica.blocks == blocks_of(self.actions.engine)
