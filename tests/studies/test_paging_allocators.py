"""The allocators of contiguous memory, against a map of the slots."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from radixkv.studies.paging.allocators import BestFit, Block, Buddy, next_power_of_two

POOLS = (1, 12, 64, 100, 257)


class SlotMap:
    """Who has each slot, kept one by one."""

    def __init__(self, n_slots: int) -> None:
        self.is_free = [True] * n_slots

    def take(self, block: Block) -> None:
        slots = range(block.start, block.start + block.n_slots)
        assert all(self.is_free[slot] for slot in slots), f"{block} overlaps with another, or leaves the pool"
        for slot in slots:
            self.is_free[slot] = False

    def give(self, block: Block) -> None:
        for slot in range(block.start, block.start + block.n_slots):
            self.is_free[slot] = True

    def runs(self) -> list[Block]:
        """The longest runs of free slots, in order."""
        runs: list[Block] = []
        for slot, is_free in enumerate(self.is_free):
            if is_free and runs and runs[-1].start + runs[-1].n_slots == slot:
                runs[-1] = Block(runs[-1].start, runs[-1].n_slots + 1)
            elif is_free:
                runs.append(Block(slot, 1))
        return runs


def halves_of(n_slots: int, size: int) -> list[Block]:
    """Every place where a buddy's block of a size can lie in a pool."""
    places: list[Block] = []
    start = 0
    for exponent in reversed(range(n_slots.bit_length())):
        if n_slots >> exponent & 1:
            places += [Block(at, size) for at in range(start, start + (1 << exponent) - size + 1, size)]
            start += 1 << exponent
    return places


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
    allocator: BestFit | Buddy, slots: SlotMap, seed: int, check: Callable[[int, Block | None], None]
) -> list[Block]:
    """Allocates and frees at random; each allocation is checked before the map has it. What is left at the end."""
    rng, n_slots = Random(seed), len(slots.is_free)
    held: list[Block] = []
    for _ in range(600):
        if held and rng.random() < 0.45:
            block = held.pop(rng.randrange(len(held)))
            allocator.free(block)
            slots.give(block)
        else:
            wanted = rng.randint(1, max(1, n_slots // 4))
            got = allocator.allocate(wanted)
            check(wanted, got)
            if got is not None:
                slots.take(got)
                held.append(got)
        assert allocator.n_free == sum(slots.is_free)
    return held


@pytest.mark.parametrize("n_slots", POOLS)
def test_best_fit_takes_the_smallest_run_that_holds_it(n_slots: int) -> None:
    allocator, slots = BestFit(n_slots), SlotMap(n_slots)

    def check(wanted: int, block: Block | None) -> None:
        fitting = [run for run in slots.runs() if run.n_slots >= wanted]
        if block is None:
            assert not fitting
        else:
            best = min(fitting, key=lambda run: (run.n_slots, run.start))
            assert block == Block(best.start, wanted)

    for block in churn(allocator, slots, n_slots, check):
        allocator.free(block)
    assert allocator.allocate(n_slots) == Block(0, n_slots)


@pytest.mark.parametrize("n_slots", POOLS)
def test_buddy_gives_a_block_wherever_two_halves_are_free(n_slots: int) -> None:
    allocator, slots = Buddy(n_slots), SlotMap(n_slots)

    def check(wanted: int, block: Block | None) -> None:
        size = next_power_of_two(wanted)
        free = [place for place in halves_of(n_slots, size) if all(slots.is_free[place.start : place.start + size])]
        if block is None:
            assert not free, "halves that are free were not joined"
        else:
            assert block in free

    churn(allocator, slots, n_slots, check)


@pytest.mark.parametrize("n_slots", POOLS)
def test_buddy_joins_everything_in_the_end(n_slots: int) -> None:
    allocator = Buddy(n_slots)
    held = [allocator.allocate(1) for _ in range(n_slots)]
    assert {block.start for block in held if block is not None} == set(range(n_slots))
    assert allocator.allocate(1) is None
    Random(0).shuffle(held)
    for block in held:
        assert block is not None
        allocator.free(block)
    largest = 1 << (n_slots.bit_length() - 1)
    assert allocator.allocate(largest) == Block(0, largest)


def test_buddy_splits_from_the_smallest_block_that_will_do() -> None:
    allocator = Buddy(16)
    first = allocator.allocate(3)
    second = allocator.allocate(2)
    assert (first, second) == (Block(0, 4), Block(4, 2))
    assert allocator.allocate(8) == Block(8, 8)
    assert allocator.allocate(3) is None
    assert allocator.n_free == 2
