"""Copies in virtual time end, whatever begins beside them."""

from __future__ import annotations

from radixkv.lab.simulator.virtual_time import Clock, TimedStore


def test_writes_end_though_a_read_begins_before_they_are_taken() -> None:
    clock = Clock()
    store = TimedStore(clock, max_pages=8, page_bytes=16, page_seconds=1.0)
    keys = [bytes([index]) * 16 for index in range(2)]
    written = store.store(keys, b"", [])
    read = store.load(keys, b"", [])
    assert [one.ticket for one in store.take_finished()] == [written]
    assert clock.next_end() == 2.0
    clock.now = 2.0
    assert [one.ticket for one in store.take_finished()] == [read]
    assert not store.take_finished()
