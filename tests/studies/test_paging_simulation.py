"""The simulated pool: figures by hand, and the engine's pages looked at one by one."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from radixkv.errors import ConfigError
from radixkv.studies.paging.allocators import BestFit, Buddy
from radixkv.studies.paging.contiguous import Contiguous, to_length, to_maximum, to_power_of_two
from radixkv.studies.paging.lengths import AllLengths, Chat, Lengths, Pair
from radixkv.studies.paging.memory import Memory, shares
from radixkv.studies.paging.paged import Paged
from radixkv.studies.paging.scheme import Scheme
from radixkv.studies.paging.sequences import Segments, Sequence, Turn, n_distinct
from radixkv.studies.paging.simulation import Stay, most_at_once, simulate
from radixkv.studies.paging.workloads import WORKLOADS, Workload, make_workload

SMALL = AllLengths(
    problems=Lengths("made", lambda rng: Pair(rng.randint(1, 12), rng.randint(1, 12))),
    requests=Lengths("made", lambda rng: Pair(rng.randint(1, 60), rng.randint(1, 60))),
    chats=Lengths(
        "made", lambda rng: Chat("", 9, tuple(Pair(rng.randint(1, 15), rng.randint(1, 15)) for _ in range(4)))
    ),
)

SCHEMES: dict[str, Callable[[int, int], Scheme]] = {
    "maximum": lambda n_slots, longest: Contiguous(BestFit(n_slots), to_maximum(longest)),
    "power of two": lambda n_slots, longest: Contiguous(Buddy(n_slots), to_power_of_two(longest)),
    "oracle": lambda n_slots, _: Contiguous(Buddy(n_slots), to_length),
    "oracle, best fit": lambda n_slots, _: Contiguous(BestFit(n_slots), to_length),
    "pages of 1": lambda n_slots, _: Paged(n_slots, 1),
    "pages of 4": lambda n_slots, _: Paged(n_slots, 4),
    "pages of 16": lambda n_slots, _: Paged(n_slots, 16),
}


def lone(segments: Segments, n_prompt: int, n_answer: int) -> Turn:
    return Turn((Sequence((segments.new(n_prompt),), segments.new(n_answer)),))


def small_workload(name: str, seed: int = 0, n_conversations: int | None = None) -> Workload:
    return make_workload(
        name, SMALL, pool_tokens=256, max_model_len=128, n_conversations=n_conversations, seed=seed
    )


def step(scheme: Scheme) -> Memory:
    scheme.begin()
    memory = scheme.memory()
    scheme.end()
    return memory


def test_reservation_to_the_maximum_by_hand() -> None:
    segments = Segments()
    scheme = Contiguous(BestFit(40), to_maximum(16))
    for n_prompt, n_answer in ((5, 3), (2, 1), (1, 1)):
        scheme.add(lone(segments, n_prompt, n_answer))
    # 5 and 2 tokens are there; the first will store 7 (its third token is never attended to), the second no more.
    assert step(scheme) == Memory(
        occupied=7, reserved=2, internal=32 - 9, external=0, free=8, cached=0, duplicate=0, stored=7, entries=2
    )
    # The second has ended, and the third has its place.
    assert step(scheme) == Memory(
        occupied=7, reserved=1, internal=32 - 8, external=0, free=8, cached=0, duplicate=0, stored=7, entries=2
    )
    assert step(scheme).allocated == 16
    assert step(scheme).allocated == 0


def test_free_slots_in_the_wrong_place_are_external() -> None:
    segments = Segments()
    scheme = Contiguous(BestFit(12), to_length)
    for n_prompt, n_answer in ((4, 1), (4, 9), (4, 1), (8, 1)):
        scheme.add(lone(segments, n_prompt, n_answer))
    assert step(scheme).external == 0, "the second needs 12 slots: none would be free together"
    assert scheme.n_waiting == 3
    scheme = Contiguous(BestFit(12), to_length)
    for n_prompt, n_answer in ((4, 1), (2, 3), (4, 1), (8, 1)):
        scheme.add(lone(segments, n_prompt, n_answer))
    assert step(scheme)[:6] == (10, 2, 0, 0, 0, 0)
    memory = step(scheme)  # 4 slots are free on either side of the second, and 8 are wanted
    assert (memory.external, memory.free) == (8, 0)


def test_a_buddy_rounds_what_is_reserved() -> None:
    segments = Segments()
    oracle, powers = Contiguous(Buddy(64), to_length), Contiguous(Buddy(64), to_power_of_two(64))
    for scheme in (oracle, powers):
        scheme.add(lone(segments, 12, 5))
    # 16 are stored in the end, which is a block; an answer rounded to 8 makes that 20, and a block of 32.
    assert step(oracle)[:3] == (12, 4, 0)
    assert step(powers)[:3] == (12, 4, 16)


def test_pages_by_hand() -> None:
    segments = Segments()
    scheme = Paged(32, 4)
    scheme.add(lone(segments, 6, 4))  # 6 to 9 tokens: 2 pages, then 3
    assert step(scheme)[:6] == (6, 2, 0, 0, 24, 0)
    assert step(scheme)[:6] == (7, 1, 0, 0, 24, 0)
    assert step(scheme)[:6] == (8, 0, 0, 0, 24, 0)
    assert step(scheme)[:6] == (9, 0, 3, 0, 20, 0)
    assert step(scheme)[:6] == (0, 0, 0, 0, 24, 8), "whole pages stay, for who asks the same"


def test_choices_share_whole_pages_and_copy_the_rest() -> None:
    segments = Segments()
    prompt = (segments.new(10),)
    scheme = Paged(64, 4)
    scheme.add(Turn(tuple(Sequence(prompt, segments.new(5)) for _ in range(3))))
    first = step(scheme)
    assert (first.occupied, first.duplicate) == (10, 0)
    second = step(scheme)  # 8 shared, then 2 of the prompt in each; the first has a token of its answer
    assert (second.occupied, second.duplicate, second.stored) == (8 + 3 + 2 + 2, 2 * 2, 11 + 10 + 10)


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_answer_is_given_once_and_the_pool_adds_up(scheme: str, name: str) -> None:
    workload = small_workload(name)
    made = SCHEMES[scheme](256, 128)
    watched = Watched(made)
    run = simulate(watched, workload)
    asked = [s for conversation in workload.conversations for turn in conversation for s in turn.sequences]
    assert sorted(map(id, watched.ended)) == sorted(map(id, asked))
    for memory in watched.moments:
        assert memory.pool == 256
        assert min(memory) >= 0
        assert memory.stored - memory.occupied >= 0
    assert sum(run.shares[1:7]) == pytest.approx(100)
    assert run.mean_batch >= 1
    assert run.n_saturated_steps == len(watched.moments) <= run.n_steps
    if isinstance(made, Paged):
        made.check()
        assert made.cache.n_available == made.cache.n_pages
    else:
        assert run.shares.cached_pct == 0
        assert run.largest_batch >= run.mean_batch


class Watched:
    """A scheme whose figures are kept, and for pages compared with what can be seen of them."""

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme
        self.moments: list[Memory] = []
        self.ended: list[Sequence] = []

    @property
    def n_waiting(self) -> int:
        return self.scheme.n_waiting

    def add(self, turn: Turn) -> None:
        self.scheme.add(turn)

    def begin(self) -> None:
        self.scheme.begin()

    def running(self) -> list[Sequence]:
        return self.scheme.running()

    def memory(self) -> Memory:
        memory = self.scheme.memory()
        self.moments.append(memory)
        if isinstance(self.scheme, Paged):
            check_pages(self.scheme, memory)
        return memory

    def end(self) -> list[Sequence]:
        ended = self.scheme.end()
        self.ended += ended
        return ended


def check_pages(scheme: Paged, memory: Memory) -> None:
    """Every slot that a block table names, with all the tokens up to its own as what it holds."""
    page_size = scheme.cache.page_size
    holds: dict[tuple[int, int], int] = {}
    pages: set[int] = set()
    reserved = 0
    running = scheme._scheduler.running
    for request in (*running, *running.releasing):
        table, sequence = request.blocks.pages, scheme._sequence(request)
        pages.update(table)
        to_come = range(request.n_scheduled, sequence.n_stored if request in set(running) else 0)
        reserved += sum(place // page_size < len(table) for place in to_come)
        ids = [token for part in (*sequence.prompt, sequence.answer) for token in part.tokens()]
        prefix = 0
        for place, token in enumerate(ids[: request.n_scheduled]):
            prefix = hash((prefix, token))
            slot = table[place // page_size], place % page_size
            assert holds.setdefault(slot, prefix) == prefix, "a slot is shared by different KV"
    assert memory.occupied == len(holds)
    assert memory.duplicate == len(holds) - len(set(holds.values()))
    assert memory.reserved == reserved
    assert memory.allocated == len(pages) * page_size


def test_pages_of_one_token_waste_nothing() -> None:
    for name in WORKLOADS:
        run = simulate(Paged(256, 1), small_workload(name))
        assert run.shares.utilisation_pct == 100
        assert run.shares.duplicate_pct == 0
        assert run.shares.lost_pct == 0
        assert run.shares.entries_per_1000_tokens == 1000


def test_the_largest_batch_of_a_reservation_is_what_fits() -> None:
    run = simulate(SCHEMES["maximum"](300, 128), small_workload("uniform-short"))
    assert run.largest_batch == run.mean_batch == 300 // 128


def test_sequences_that_are_retracted_do_not_count_as_a_batch() -> None:
    """Two of 4 pages grow to 8 each in a pool of 12: only one can get to its end at a time."""
    segments = Segments()
    workload = Workload("made", "made", [(lone(segments, 16, 17),) for _ in range(3)], [0, 0, 0], 0)
    scheme = Paged(12 * 4, 4)
    run = simulate(scheme, workload)
    assert scheme.n_retractions >= 1
    assert run.largest_batch == 1


@pytest.mark.parametrize(("page_size", "seed"), [(4, 61), (4, 66), (2, 55)])
def test_a_sequence_may_give_way_in_the_step_of_its_last_token(page_size: int, seed: int) -> None:
    scheme = Paged(256, page_size)
    workload = small_workload("parallel-sampling", seed=seed)
    assert simulate(scheme, workload).largest_batch > 0
    scheme.check()


def test_turns_wait_for_the_answer_before() -> None:
    workload = small_workload("multi-turn")
    watched = Watched(SCHEMES["pages of 4"](256, 128))
    simulate(watched, workload)
    order = {id(sequence): place for place, sequence in enumerate(watched.ended)}
    for conversation in workload.conversations:
        places = [order[id(turn.sequences[0])] for turn in conversation]
        assert places == sorted(places)


@pytest.mark.parametrize("scheme", ["oracle", "pages of 4"])
def test_a_turn_waits_for_every_answer_before(scheme: str) -> None:
    segments = Segments()
    prompt = (segments.new(9),)
    first = Turn((Sequence(prompt, segments.new(2)), Sequence(prompt, segments.new(90))))
    second = lone(segments, 10, 3)
    others = [(lone(segments, 100, 5),) for _ in range(6)]
    workload = Workload("made", "made", [(first, second), *others], [0] * 7, 0)
    watched = Watched(SCHEMES[scheme](256, 128))
    simulate(watched, workload)
    assert len(watched.ended) == 9
    assert watched.ended.index(second.sequences[0]) > watched.ended.index(first.sequences[1])


def test_a_pool_that_nobody_fills_is_refused() -> None:
    workload = small_workload("uniform-short", n_conversations=3)
    with pytest.raises(ConfigError, match="memory never ran out in uniform-short, with 3 sequences"):
        simulate(Paged(4096, 16), workload)


def test_most_at_once() -> None:
    assert most_at_once([]) == 0
    assert most_at_once([Stay(0, 0), Stay(1, 1)]) == 1
    assert most_at_once([Stay(0, 1), Stay(1, 1), Stay(2, 5)]) == 2
    rng = Random(0)
    stays = [Stay(first := rng.randrange(50), first + rng.randrange(10)) for _ in range(200)]
    assert most_at_once(stays) == max(sum(s.first <= at <= s.last for s in stays) for at in range(60))


def test_distinct_tokens_against_whole_prefixes() -> None:
    rng, segments = Random(3), Segments()
    known = [()]
    sequences: list[Sequence] = []
    for _ in range(40):
        prompt = (*rng.choice(known), segments.new(rng.randrange(5)))
        sequences.append(Sequence(prompt, segments.new(rng.randint(1, 5))))
        known += [prompt, (*prompt, sequences[-1].answer)]
    stored = [(sequence, rng.randint(0, sequence.n_stored)) for sequence in sequences]
    prefixes = set()
    for sequence, n_tokens in stored:
        ids = [token for part in (*sequence.prompt, sequence.answer) for token in part.tokens()]
        prefixes.update(tuple(ids[: place + 1]) for place in range(n_tokens))
    assert n_distinct(stored) == len(prefixes)


def test_shares_by_hand() -> None:
    moments = [
        Memory(occupied=6, reserved=1, internal=1, external=0, free=2, cached=0, duplicate=3, stored=12, entries=2),
        Memory(occupied=2, reserved=0, internal=0, external=8, free=0, cached=0, duplicate=1, stored=4, entries=2),
    ]
    found = shares(moments)
    assert found[:8] == (80, 40, 5, 5, 40, 10, 0, 50)
    assert (found.tokens_per_slot, found.entries_per_1000_tokens) == (2, 250)
    assert (found.fragmentation_pct, found.lost_pct) == (45, 60)
