"""Random histories of engines whose models have states, of which a subscriber knows what prompts can go on from."""

from __future__ import annotations

from hypothesis.stateful import invariant

from radixkv.runtime.events.kv_events import KVEvents
from radixkv.runtime.events.log import EventLog
from radixkv.tree.digest import chained_xxh3_64, namespace_digest
from radixkv.tree.node import Namespace
from radixkv.wire.messages import pack_tokens
from support.actions import Actions
from support.engine_machine import MixedEngineMachine, RecurrentEngineMachine
from support.publishing_machine import Feed
from support.replica import Replica


def hashes_of(namespace: Namespace, tokens: list[int], page_size: int) -> list[int]:
    """Returns the hash of each whole page, as docs/events.md tells subscribers to compute it."""
    digest, digests = namespace_digest(namespace), []
    for first in range(0, len(tokens) - page_size + 1, page_size):
        digest = chained_xxh3_64(digest, pack_tokens(tokens[first : first + page_size]))
        digests.append(digest)
    return digests


class Watch:
    """A subscriber from the beginning, and what it must know of an engine's tiers."""

    def __init__(self, actions: Actions) -> None:
        self._actions, engine = actions, actions.engine
        self._feed = Feed()
        log = EventLog(engine.cache, engine.scheduler.tiers.changes(), shows_salted_tokens=True)
        self._events = KVEvents(log, self._feed)  # type: ignore[arg-type]
        self._replica = Replica()
        self._n_applied = 0

    def check(self) -> None:
        """Checks that events alone tell what ``/cache/match`` does, to the first subscriber and to a late one."""
        self._feed.wants_snapshot = True
        self._events.advance()
        for batch in self._feed.batches[self._n_applied :]:
            self._replica.apply(batch)
        self._n_applied = len(self._feed.batches)
        late = Replica()
        for batch in self._feed.snapshot:
            late.apply(batch)
        assert late == self._replica
        engine = self._actions.engine
        for medium, cache in (("GPU", engine.cache), ("CPU", engine.host)):
            for namespace in self._actions.namespaces:
                for tokens in self._actions.known:
                    hashes = hashes_of(namespace, tokens[:-1], engine.page_size)
                    n_usable = self._replica.n_usable(medium, hashes) * engine.page_size
                    assert n_usable == cache.matches([(namespace, pack_tokens(tokens))])[0], medium


class StateEventsMachine(RecurrentEngineMachine):
    """Of recurrent layers."""

    watch: Watch | None = None

    @invariant()
    def events_tell_what_matches(self) -> None:
        if hasattr(self, "actions"):
            self.watch = self.watch or Watch(self.actions)  # before the first rule: the tree is empty
            self.watch.check()


class TailEventsMachine(MixedEngineMachine):
    """Of layers with windows."""

    watch: Watch | None = None

    @invariant()
    def events_tell_what_matches(self) -> None:
        if hasattr(self, "actions"):
            self.watch = self.watch or Watch(self.actions)  # before the first rule: the tree is empty
            self.watch.check()
