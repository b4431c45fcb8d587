"""Simulated workloads: slot usage compared with a page-by-page recount, batches, turns and waiting."""

from __future__ import annotations

from random import Random

import pytest

from radixkv.errors import ConfigError
from radixkv.lab.studies.paging import schemes
from radixkv.lab.studies.paging.lengths import ChatLengths, LengthDistribution, LengthPair, WorkloadLengths
from radixkv.lab.studies.paging.memory import SlotUsage, average_shares
from radixkv.lab.studies.paging.paged import PagedScheme
from radixkv.lab.studies.paging.schemes import Pool
from radixkv.lab.studies.paging.sequences import SimulatedSequence, TokenRangeSource, Turn, count_distinct_tokens
from radixkv.lab.studies.paging.simulation import RunningSpan, Scheme, max_overlap, simulate
from radixkv.lab.studies.paging.workloads import WORKLOADS, StudyWorkload, generate_workload
from support.cases import covering

SMALL = WorkloadLengths(
    problems=LengthDistribution("synthetic", lambda rng: LengthPair(rng.randint(1, 12), rng.randint(1, 12))),
    requests=LengthDistribution("synthetic", lambda rng: LengthPair(rng.randint(1, 60), rng.randint(1, 60))),
    chats=LengthDistribution(
        "synthetic",
        lambda rng: ChatLengths("", 9, tuple(LengthPair(rng.randint(1, 15), rng.randint(1, 15)) for _ in range(4))),
    ),
)

SCHEMES = {name: make for name, make in schemes.SCHEMES.items() if name not in schemes.WITH_GRANULES} | {
    f"pages of {size}": lambda pool, size=size: PagedScheme(pool.n_slots, size) for size in (1, 4)
}


def open_scheme(name: str, n_slots: int = 256) -> Scheme:
    return SCHEMES[name](Pool(n_slots, max_model_len=128, mean_answer=6, page_size=16))


def single_turn(token_ranges: TokenRangeSource, n_prompt: int, n_answer: int) -> Turn:
    return Turn((SimulatedSequence((token_ranges.new(n_prompt),), token_ranges.new(n_answer)),))


def small_workload(name: str, seed: int = 0, n_conversations: int | None = None) -> StudyWorkload:
    return generate_workload(
        name, SMALL, pool_tokens=256, max_model_len=128, n_conversations=n_conversations, seed=seed
    )


@pytest.mark.parametrize(("scheme", "name"), covering([*SCHEMES], [*WORKLOADS]))
def test_each_sequence_finishes_once_and_the_pool_adds_up(scheme: str, name: str) -> None:
    workload = small_workload(name)
    inner = open_scheme(scheme)
    recorded = RecordingScheme(inner)
    run = simulate(recorded, workload)
    requested = [s for conversation in workload.conversations for turn in conversation for s in turn.sequences]
    assert sorted(map(id, recorded.ended)) == sorted(map(id, requested))
    for slot_usage in recorded.usages:
        assert slot_usage.pool == 256
        assert min(slot_usage) >= 0
        assert slot_usage.stored >= slot_usage.occupied - slot_usage.duplicate
    assert sum(run.shares[1:7]) == pytest.approx(100)
    assert run.mean_batch >= 1
    assert run.n_saturated_steps == len(recorded.usages) <= run.n_steps
    if isinstance(inner, PagedScheme):
        inner.check()
        assert inner.cache.n_available == inner.cache.n_pages
    else:
        assert run.shares.cached_pct == 0
        if not inner.n_preemptions:
            assert run.largest_batch >= run.mean_batch


class RecordingScheme:
    """A scheme that records its slot usage and, for pages, compares it with a recount."""

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme
        self.usages: list[SlotUsage] = []
        self.ended: list[SimulatedSequence] = []

    @property
    def n_waiting(self) -> int:
        return self.scheme.n_waiting

    @property
    def n_preemptions(self) -> int:
        return self.scheme.n_preemptions

    def add(self, turn: Turn) -> None:
        self.scheme.add(turn)

    def begin(self) -> None:
        self.scheme.begin()

    def running(self) -> list[SimulatedSequence]:
        return self.scheme.running()

    def slot_usage(self) -> SlotUsage:
        slot_usage = self.scheme.slot_usage()
        self.usages.append(slot_usage)
        if isinstance(self.scheme, PagedScheme):
            check_pages(self.scheme, slot_usage)
        return slot_usage

    def end(self) -> list[SimulatedSequence]:
        ended = self.scheme.end()
        self.ended += ended
        return ended


def check_pages(scheme: PagedScheme, slot_usage: SlotUsage) -> None:
    """Recounts all slots in block tables; the contents of a slot are the hash of its token and prefix."""
    page_size = scheme.cache.page_size
    contents: dict[tuple[int, int], int] = {}
    pages: set[int] = set()
    reserved = 0
    running = scheme.scheduler.running
    for request in (*running, *running.releasing):
        table, sequence = request.blocks.pages, scheme.sequence_of(request)
        pages.update(table)
        to_come = range(request.n_scheduled, sequence.n_stored if request in set(running) else 0)
        reserved += sum(position // page_size < len(table) for position in to_come)
        ids = [token for token_range in (*sequence.prompt, sequence.answer) for token in token_range.tokens()]
        prefix = 0
        for position, token in enumerate(ids[: request.n_scheduled]):
            prefix = hash((prefix, token))
            slot = table[position // page_size], position % page_size
            assert contents.setdefault(slot, prefix) == prefix, "a slot is shared by different KV"
    assert slot_usage.occupied == len(contents)
    assert slot_usage.duplicate == len(contents) - len(set(contents.values()))
    assert slot_usage.reserved == reserved
    assert slot_usage.allocated == len(pages) * page_size


def test_pages_of_one_token_waste_nothing() -> None:
    for name in WORKLOADS:
        run = simulate(PagedScheme(256, 1), small_workload(name))
        assert run.shares.utilisation_pct == 100
        assert run.shares.duplicate_pct == 0
        assert run.shares.lost_pct == 0
        assert run.shares.entries_per_1000_tokens == 1000


def test_the_largest_batch_of_a_reservation_is_what_fits() -> None:
    run = simulate(open_scheme(schemes.RESERVE_MAXIMUM, 300), small_workload("uniform-short"))
    assert run.largest_batch == run.mean_batch == 300 // 128


def test_sequences_that_are_preempted_do_not_count_as_a_batch() -> None:
    """Two of 4 pages grow to 8 each in a pool of 12: only one can get to its end at a time."""
    token_ranges = TokenRangeSource()
    workload = StudyWorkload(
        "synthetic", "synthetic", [(single_turn(token_ranges, 16, 17),) for _ in range(3)], [0, 0, 0], 0
    )
    scheme = PagedScheme(12 * 4, 4)
    run = simulate(scheme, workload)
    assert scheme.n_preemptions >= 1
    assert run.largest_batch == 1


@pytest.mark.parametrize(("page_size", "seed"), [(4, 61), (4, 66), (2, 55)])
def test_a_sequence_may_be_preempted_in_the_step_of_its_last_token(page_size: int, seed: int) -> None:
    scheme = PagedScheme(256, page_size)
    workload = small_workload("parallel-sampling", seed=seed)
    assert simulate(scheme, workload).largest_batch > 0
    scheme.check()


def test_turns_wait_for_the_answer_before() -> None:
    workload = small_workload("multi-turn")
    recorded = RecordingScheme(open_scheme("pages of 4"))
    simulate(recorded, workload)
    order = {id(sequence): position for position, sequence in enumerate(recorded.ended)}
    for conversation in workload.conversations:
        positions = [order[id(turn.sequences[0])] for turn in conversation]
        assert positions == sorted(positions)


@pytest.mark.parametrize("scheme", ["oracle", "pages of 4"])
def test_a_turn_waits_for_every_answer_before(scheme: str) -> None:
    token_ranges = TokenRangeSource()
    prompt = (token_ranges.new(9),)
    first = Turn((SimulatedSequence(prompt, token_ranges.new(2)), SimulatedSequence(prompt, token_ranges.new(90))))
    second = single_turn(token_ranges, 10, 3)
    others = [(single_turn(token_ranges, 100, 5),) for _ in range(6)]
    workload = StudyWorkload("synthetic", "synthetic", [(first, second), *others], [0] * 7, 0)
    recorded = RecordingScheme(open_scheme(scheme))
    simulate(recorded, workload)
    assert len(recorded.ended) == 9
    assert recorded.ended.index(second.sequences[0]) > recorded.ended.index(first.sequences[1])


def test_a_pool_that_never_fills_is_refused() -> None:
    workload = small_workload("uniform-short", n_conversations=3)
    with pytest.raises(ConfigError, match="memory never ran out in uniform-short, with 3 sequences"):
        simulate(PagedScheme(4096, 16), workload)


def test_max_overlap() -> None:
    assert max_overlap([]) == 0
    assert max_overlap([RunningSpan(0, 0), RunningSpan(1, 1)]) == 1
    assert max_overlap([RunningSpan(0, 1), RunningSpan(1, 1), RunningSpan(2, 5)]) == 2
    rng = Random(0)
    spans = [RunningSpan(first := rng.randrange(50), first + rng.randrange(10)) for _ in range(200)]
    assert max_overlap(spans) == max(sum(s.first <= at <= s.last for s in spans) for at in range(60))


def test_distinct_tokens_against_whole_prefixes() -> None:
    rng, token_ranges = Random(3), TokenRangeSource()
    known = [()]
    sequences: list[SimulatedSequence] = []
    for _ in range(40):
        prompt = (*rng.choice(known), token_ranges.new(rng.randrange(5)))
        sequences.append(SimulatedSequence(prompt, token_ranges.new(rng.randint(1, 5))))
        known += [prompt, (*prompt, sequences[-1].answer)]
    stored = [(sequence, rng.randint(0, sequence.n_stored)) for sequence in sequences]
    prefixes = set()
    for sequence, n_tokens in stored:
        ids = [token for token_range in (*sequence.prompt, sequence.answer) for token in token_range.tokens()]
        prefixes.update(tuple(ids[: position + 1]) for position in range(n_tokens))
    assert count_distinct_tokens(stored) == len(prefixes)


def test_shares_by_hand() -> None:
    usages = [
        SlotUsage(
            occupied=6, reserved=1, internal=1, external=0, free=2, cached=0, duplicate=3, stored=12, entries=2
        ),
        SlotUsage(
            occupied=2, reserved=0, internal=0, external=8, free=0, cached=0, duplicate=1, stored=4, entries=2
        ),
    ]
    averages = average_shares(usages)
    assert averages[:8] == (80, 40, 5, 5, 40, 10, 0, 50)
    assert (averages.tokens_per_slot, averages.entries_per_1000_tokens) == (2, 250)
    assert (averages.fragmentation_pct, averages.lost_pct) == (45, 60)
