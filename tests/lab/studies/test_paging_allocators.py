"""The allocators of contiguous memory compared with a map of all slots."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from radixkv.lab.studies.paging.allocators import BestFitAllocator, BuddyAllocator, Extent, next_power_of_two

POOLS = (1, 12, 64, 100, 257)


class SlotMap:
    """Whether each slot is free."""

    def __init__(self, n_slots: int) -> None:
        self.is_free = [True] * n_slots

    def take(self, extent: Extent) -> None:
        slots = range(extent.start, extent.start + extent.n_slots)
        assert all(self.is_free[slot] for slot in slots), f"{extent} overlaps another, or exceeds the pool"
        for slot in slots:
            self.is_free[slot] = False

    def give(self, extent: Extent) -> None:
        for slot in range(extent.start, extent.start + extent.n_slots):
            self.is_free[slot] = True

    def free_extents(self) -> list[Extent]:
        """Returns the maximal free extents, in order."""
        extents: list[Extent] = []
        for slot, is_free in enumerate(self.is_free):
            if is_free and extents and extents[-1].start + extents[-1].n_slots == slot:
                extents[-1] = Extent(extents[-1].start, extents[-1].n_slots + 1)
            elif is_free:
                extents.append(Extent(slot, 1))
        return extents


def buddy_extents(n_slots: int, size: int) -> list[Extent]:
    """Returns all extents of a size that a buddy allocator can give in a pool."""
    extents: list[Extent] = []
    start = 0
    for exponent in reversed(range(n_slots.bit_length())):
        if n_slots >> exponent & 1:
            extents += [Extent(at, size) for at in range(start, start + (1 << exponent) - size + 1, size)]
            start += 1 << exponent
    return extents


def test_next_power_of_two() -> None:
    assert [next_power_of_two(number) for number in (1, 2, 3, 4, 5, 1023, 1024, 1025)] == [
        1,
        2,
        4,
        4,
        8,
        1024,
        1024,
        2048,
    ]


def churn(
    allocator: BestFitAllocator | BuddyAllocator,
    slots: SlotMap,
    seed: int,
    check: Callable[[int, Extent | None], None],
) -> list[Extent]:
    """Allocates and frees at random and checks each allocation; returns the extents that are left at the end."""
    rng, n_slots = Random(seed), len(slots.is_free)
    held: list[Extent] = []
    for _ in range(600):
        if held and rng.random() < 0.45:
            extent = held.pop(rng.randrange(len(held)))
            allocator.free(extent)
            slots.give(extent)
        else:
            n_requested = rng.randint(1, max(1, n_slots // 4))
            allocated = allocator.allocate(n_requested)
            check(n_requested, allocated)
            if allocated is not None:
                slots.take(allocated)
                held.append(allocated)
        assert allocator.n_free == sum(slots.is_free)
    return held


@pytest.mark.parametrize("n_slots", POOLS)
def test_best_fit_takes_the_smallest_sufficient_extent(n_slots: int) -> None:
    allocator, slots = BestFitAllocator(n_slots), SlotMap(n_slots)

    def check(n_requested: int, extent: Extent | None) -> None:
        fitting = [each for each in slots.free_extents() if each.n_slots >= n_requested]
        if extent is None:
            assert not fitting
        else:
            best = min(fitting, key=lambda each: (each.n_slots, each.start))
            assert extent == Extent(best.start, n_requested)

    for extent in churn(allocator, slots, n_slots, check):
        allocator.free(extent)
    assert allocator.allocate(n_slots) == Extent(0, n_slots)


@pytest.mark.parametrize("n_slots", POOLS)
def test_buddy_gives_an_extent_whenever_one_is_free(n_slots: int) -> None:
    allocator, slots = BuddyAllocator(n_slots), SlotMap(n_slots)

    def check(n_requested: int, extent: Extent | None) -> None:
        size = next_power_of_two(n_requested)
        free = [
            candidate
            for candidate in buddy_extents(n_slots, size)
            if all(slots.is_free[candidate.start : candidate.start + size])
        ]
        if extent is None:
            assert not free, "free buddies were not merged"
        else:
            assert extent in free

    churn(allocator, slots, n_slots, check)


@pytest.mark.parametrize("n_slots", POOLS)
def test_buddy_merges_everything_in_the_end(n_slots: int) -> None:
    allocator = BuddyAllocator(n_slots)
    held = [allocator.allocate(1) for _ in range(n_slots)]
    assert {extent.start for extent in held if extent is not None} == set(range(n_slots))
    assert allocator.allocate(1) is None
    Random(0).shuffle(held)
    for extent in held:
        assert extent is not None
        allocator.free(extent)
    largest = 1 << (n_slots.bit_length() - 1)
    assert allocator.allocate(largest) == Extent(0, largest)


def test_buddy_splits_the_smallest_sufficient_extent() -> None:
    allocator = BuddyAllocator(16)
    first = allocator.allocate(3)
    second = allocator.allocate(2)
    assert (first, second) == (Extent(0, 4), Extent(4, 2))
    assert allocator.allocate(8) == Extent(8, 8)
    assert allocator.allocate(3) is None
    assert allocator.n_free == 2
