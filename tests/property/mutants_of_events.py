"""Mutants of the events: each makes subscribers believe in pages that are not there, or miss some that are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from radixkv.runtime.events.log import EventLog
from radixkv.runtime.tiers.storage_changes import StorageChanges
from radixkv.tree.changes import ChangeLog
from radixkv.tree.forest import Forest
from radixkv.tree.states import NodeStates

Patch = pytest.MonkeyPatch


def announce_what_is_scheduled(patch: Patch) -> None:
    append = Forest.append

    def mutant(self: Forest, end: Any, tokens: bytes, pages: Any, n_hits: int = 0) -> Any:
        last = append(self, end, tokens, pages, n_hits)
        if self.changes.is_on:
            self.changes.add_stored(last, len(last.pages) - len(pages), len(last.pages))
        return last

    patch.setattr(Forest, "append", mutant)


def keep_what_is_evicted(patch: Patch) -> None:
    patch.setattr(ChangeLog, "add_removed", lambda self, node, first, last: None)


def publish_one_event_a_turn(patch: Patch) -> None:
    take = EventLog.take

    patch.setattr(EventLog, "take", lambda self: take(self)[:1])


def keep_what_the_store_has_lost(patch: Patch) -> None:
    def mutant(self: StorageChanges) -> Any:
        changes, self._changes = self._changes, []
        return changes

    patch.setattr(StorageChanges, "take", mutant)


def forget_what_is_written(patch: Patch) -> None:
    patch.setattr(StorageChanges, "add_stored", lambda self, namespace, tokens: None)


def leave_a_run_out_of_the_snapshot(patch: Patch) -> None:
    snapshot = EventLog.snapshot
    patch.setattr(EventLog, "snapshot", lambda self: iter(list(snapshot(self))[:-1]))


def keep_a_state_that_has_left(patch: Patch) -> None:
    patch.setattr(ChangeLog, "add_lost", lambda self, state: None)


def forget_a_state_that_was_copied(patch: Patch) -> None:
    attach = NodeStates.attach

    def mutant(self: NodeStates, lease: Any, n_tokens: int, slot: int, **settings: Any) -> Any:
        log = self._forest.changes
        was_on, log.is_on = log.is_on, False
        try:
            return attach(self, lease, n_tokens, slot, **settings)
        finally:
            log.is_on = was_on

    patch.setattr(NodeStates, "attach", mutant)


def leave_a_state_out_of_the_snapshot(patch: Patch) -> None:
    kept = ChangeLog.kept_states
    patch.setattr(ChangeLog, "kept_states", lambda self: iter(list(kept(self))[:-1]))


OF_EVENTS_OF_STATES: tuple[Callable[[Patch], None], ...] = (
    keep_a_state_that_has_left,
    forget_a_state_that_was_copied,
    leave_a_state_out_of_the_snapshot,
)
OF_EVENTS: tuple[Callable[[Patch], None], ...] = (
    announce_what_is_scheduled,
    keep_what_is_evicted,
    publish_one_event_a_turn,
    keep_what_the_store_has_lost,
    forget_what_is_written,
    leave_a_run_out_of_the_snapshot,
)
