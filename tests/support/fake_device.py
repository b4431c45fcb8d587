"""A device without numbers: a KV slot holds what it was written for, and every read checks it.

The value of a slot is a link of a hash chain over (namespace, tokens up to there), so a row that reads another
prefix's page, a page that was freed, or one that is not written yet is found at once.  The sampled token is a
function of the whole chain, of the seed and of what is banned; logprobs and scores are functions of the chain and
the token.  ``answer`` and ``prompt_scores`` compute them without any device.
"""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from radixkv.errors import DeviceError
from radixkv.runtime.step.plan import Row, RowSampling, SharedRun, StepPlan
from radixkv.runtime.step.result import StepResult
from radixkv.tree.node import Namespace
from radixkv.wire import TokenLogprobs

VOCAB_SIZE = 1000
NAN = "nan"
POISON = "poison"
ATTENTION_S = 0.125
"""What attention takes in each step, so they say."""


def start(namespace: Namespace) -> int:
    """The chain before the first token."""
    return zlib.crc32(repr(namespace).encode())


def link(previous: int, token: int) -> int:
    """The chain's next link."""
    return hash((previous, token))


def chain(namespace: Namespace, tokens: Iterable[int]) -> int:
    """The chain's end behind the tokens."""
    end = start(namespace)
    for token in tokens:
        end = link(end, token)
    return end


def sampled(end: int, seed: int = 0, banned: Sequence[int] = ()) -> int:
    """The token that follows a chain."""
    token = 100 + (end + seed * 7919) % (VOCAB_SIZE - 100)
    while token in banned:
        token = 100 + (token - 99) % (VOCAB_SIZE - 100)
    return token


def score(end: int, token: int) -> TokenLogprobs:
    """How likely a token is behind a chain."""
    return TokenLogprobs(-float(link(end, token) % 10_007), 1, b"", b"")


def answer(
    namespace: Namespace,
    prompt: Sequence[int],
    n_tokens: int,
    stop: Sequence[int] = (),
    *,
    seed: int = 0,
    min_tokens: int = 0,
    banned: Sequence[int] = (),
) -> list[int]:
    """The right answer, computed naively."""
    end = chain(namespace, prompt)
    tokens: list[int] = []
    while len(tokens) < n_tokens and not (tokens and tokens[-1] in stop):
        tokens.append(sampled(end, seed, banned if len(tokens) < min_tokens else ()))
        end = link(end, tokens[-1])
    return tokens


def prompt_scores(namespace: Namespace, prompt: Sequence[int]) -> list[TokenLogprobs]:
    """Of every token but the first."""
    return [score(chain(namespace, prompt[:place]), prompt[place]) for place in range(1, len(prompt))]


def unpacked(tokens: bytes) -> list[int]:
    return array("i", tokens).tolist()


@dataclass
class FakePending:
    device: FakeDevice
    plan: StepPlan
    outcome: StepResult | DeviceError | None = None

    def result(self) -> StepResult:
        while self.outcome is None:
            self.device.run_next()
        if isinstance(self.outcome, DeviceError):
            raise self.outcome
        return self.outcome


@dataclass
class FakeDevice:
    """Runs plans in the order of their launches, each as late as it is asked for."""

    n_pages: int
    page_size: int
    vocab_size: int = VOCAB_SIZE
    wants_shared_runs: bool = True
    namespaces: dict[int, Namespace] = field(default_factory=dict)
    """Of the request in each slot; the harness knows it."""
    free_pages: set[int] = field(default_factory=set)
    """What the cache calls free when a step runs; writing or reading those is an error."""
    fail_steps: set[int] = field(default_factory=set)
    refuse_launches: int = 0
    nan_slots: set[int] = field(default_factory=set)
    """Slots whose next row computes NaN."""
    nan_logits_slots: set[int] = field(default_factory=set)
    """Slots whose next row has NaN logits only: its KV is sound."""
    broken: set[tuple[int, int]] = field(default_factory=set)
    """(step, slot) of the rows that were not finite by their own fault."""
    trace: list[str] = field(default_factory=list)
    executed: list[StepPlan] = field(default_factory=list)
    computed: list[tuple[int, int, int]] = field(default_factory=list)
    """(step, slot, tokens computed)"""
    batch_slots: dict[tuple[int, int], tuple[int, int] | str] = field(default_factory=dict)
    tables: dict[int, list[int]] = field(default_factory=dict)
    last_token: dict[int, int | None] = field(default_factory=dict)
    histories: dict[int, tuple[int, list[int] | None]] = field(default_factory=dict)
    """By slot: the prompt's length, and all tokens that penalties know of; None if one of them was not finite."""
    copied: set[tuple[int, int]] = field(default_factory=set)
    """KV slots that hold a copy, which the fork may write over."""
    _queue: deque[FakePending] = field(default_factory=deque)

    n_closed: int = 0

    def close(self) -> None:
        self.n_closed += 1

    def launch(self, plan: StepPlan) -> FakePending:
        if self.refuse_launches:
            self.refuse_launches -= 1
            raise DeviceError("the launch was refused")
        self.trace.append(f"launch {plan.step}")
        pending = FakePending(self, plan)
        self._queue.append(pending)
        return pending

    def poison(self, pages: Iterable[int]) -> None:
        for page in pages:
            for offset in range(self.page_size):
                self.batch_slots[page, offset] = POISON
                self.copied.discard((page, offset))

    def run_next(self) -> None:
        pending = self._queue.popleft()
        self.trace.append(f"result {pending.plan.step}")
        if pending.plan.step in self.fail_steps:
            for failed in (pending, *self._queue):
                failed.outcome = DeviceError(f"step {pending.plan.step} failed")
            self._queue.clear()
            return
        pending.outcome = self._execute(pending.plan)
        self.executed.append(pending.plan)

    def _execute(self, plan: StepPlan) -> StepResult:
        writer: dict[tuple[int, int], int] = {}
        self._copy(plan)
        for row in plan.rows:
            table = self.tables.setdefault(row.batch_slot, [])
            del table[row.table_start :]
            table += row.table_pages
        self._check_shared(plan)
        self.broken |= {
            (plan.step, row.batch_slot)
            for row in plan.rows
            if row.batch_slot in self.nan_slots | self.nan_logits_slots
        }
        chains: list[list[int] | None] = []
        for index, row in enumerate(plan.rows):
            chains.append(self._write(index, row, writer))
            self.computed.append((plan.step, row.batch_slot, row.n_tokens))
        ends = [self._read(index, row, chains[index], writer) for index, row in enumerate(plan.rows)]
        rows = list(zip(plan.rows, ends, strict=True))
        tokens = [
            -1 if row.sampling is None else self._choose(row.batch_slot, row.sampling, end) for row, end in rows
        ]
        return StepResult(
            tokens=tuple(tokens),
            finite=tuple(end is not None for end in ends),
            logprobs=tuple(
                None
                if end is None or row.sampling is None or row.sampling.n_logprobs is None
                else score(end, token)
                for (row, end), token in zip(rows, tokens, strict=True)
            ),
            scores=tuple(self._score(row, links) for row, links in zip(plan.rows, chains, strict=True)),
            attention_seconds=ATTENTION_S,
        )

    def _check_shared(self, plan: StepPlan) -> None:
        """Rows that continue an answer come first; shared runs are true of the block tables, and nest."""
        last = max((index for index, row in enumerate(plan.rows) if row.tokens is None), default=0)
        assert all(row.n_tokens == 1 for row in plan.rows[:last]), "rows that continue an answer come first"
        outer: dict[int, list[SharedRun]] = {}
        for run in plan.shared:
            assert len(run.rows) > 1, "a row shares with itself"
            assert list(run.rows) == sorted(set(run.rows)), "rows ascend"
            end = run.first_page + run.n_pages
            pages = [self.tables[plan.rows[index].batch_slot][run.first_page : end] for index in run.rows]
            assert len(pages[0]) == run.n_pages > 0, "a run reaches beyond the block table"
            assert all(other == pages[0] for other in pages), "rows are said to share pages that they do not share"
            for index in run.rows:
                assert all(row.n_tokens == 1 for row in plan.rows[: index + 1]), "a row of one token comes first"
                assert end * self.page_size <= plan.rows[index].start, "the row's token comes behind what it shares"
                for before in outer.setdefault(index, []):
                    assert set(run.rows) < set(before.rows), "runs nest, those of more rows before"
                    assert before.first_page + before.n_pages <= run.first_page, "runs follow one another"
                outer[index].append(run)

    def _copy(self, plan: StepPlan) -> None:
        """Page by page, before anything is written."""
        for source, destination in plan.copies:
            assert source not in self.free_pages, f"page {source} is copied, and free"
            assert destination not in self.free_pages, (
                f"page {source} is copied to page {destination}, which is free"
            )
            for offset in range(self.page_size):
                value = self.batch_slots.get((source, offset))
                assert self.batch_slots.get((destination, offset)) in (None, POISON), "a copy overwrites live KV"
                if value is not None:
                    self.batch_slots[destination, offset] = value
                    self.copied.add((destination, offset))

    def _choose(self, batch_slot: int, how: RowSampling, end: int | None) -> int:
        """The next token; -1 if the row is not finite. Checks that penalties would know the right tokens."""
        token = None if end is None else sampled(end, how.seed if how.temperature else 0, how.banned)
        if how.history is not None:
            assert how.has_penalties, "a history that nobody asked for"
            self.histories[batch_slot] = how.history.n_prompt, unpacked(how.history.tokens)
        if how.has_penalties:
            n_prompt, known = self.histories[batch_slot]
            if end is not None and known is not None:
                assert chain(self.namespaces[batch_slot], known) == end, "penalties know other tokens than the row"
                assert len(known) - n_prompt == how.index, "the prompt's end is not where penalties have it"
            self.histories[batch_slot] = n_prompt, None if known is None or token is None else [*known, token]
        self.last_token[batch_slot] = token
        return -1 if token is None else token

    @staticmethod
    def _score(row: Row, links: list[int] | None) -> tuple[TokenLogprobs, ...] | None:
        if row.scoring is None or links is None:
            return None
        targets = unpacked(row.scoring.targets)
        assert row.n_tokens - 1 <= len(targets) <= row.n_tokens, "so many tokens do not follow the row's"
        assert targets, "a row scores nothing"
        return tuple(score(end, token) for end, token in zip(links, targets, strict=False))

    def _slot(self, row: Row, position: int) -> tuple[int, int]:
        page = self.tables[row.batch_slot][position // self.page_size]
        assert page not in self.free_pages, f"slot {row.batch_slot} uses page {page}, which is free"
        return page, position % self.page_size

    def _write(self, index: int, row: Row, writer: dict[tuple[int, int], int]) -> list[int] | None:
        """Writes the row's KV; gives its chain, or None if it is not finite."""
        if row.tokens is None:
            last = self.last_token[row.batch_slot]
            tokens = None if last is None else [last]
        else:
            tokens = unpacked(row.tokens)
            assert len(tokens) == row.n_tokens
        end: int | None = start(self.namespaces[row.batch_slot])
        if row.start:
            before = self.batch_slots.get(self._slot(row, row.start - 1))
            assert before is not None, "KV of the token before was never written"
            assert before != POISON, f"slot {row.batch_slot} continues freed KV"
            end = None if isinstance(before, str) else before[1]
        if row.batch_slot in self.nan_slots or tokens is None:
            end = None
        chain: list[int] | None = [] if end is not None else None
        for offset in range(row.n_tokens):
            value: tuple[int, int] | str = NAN
            if end is not None and tokens is not None and chain is not None:
                following = link(end, tokens[offset])
                value, end = (end, following), following
                chain.append(following)
            position = row.start + offset
            if position >= row.write_start:
                target = self._slot(row, position)
                is_open = target in self.copied or self.batch_slots.get(target) in (None, POISON)
                assert is_open, f"slot {row.batch_slot} writes over live KV"
                self.copied.discard(target)
                writer[target] = index
                self.batch_slots[target] = value
        self.nan_slots.discard(row.batch_slot)
        return chain

    def _read(
        self, index: int, row: Row, chain: list[int] | None, writer: dict[tuple[int, int], int]
    ) -> int | None:
        """Checks all KV that the row attends to; gives the end of its chain, or None if it is not finite."""
        previous, finite = start(self.namespaces[row.batch_slot]), chain is not None
        for position in range(row.start + row.n_tokens):
            target = self._slot(row, position)
            assert writer.get(target, -1) <= index, "a reader stands before its writer"
            value = self.batch_slots.get(target)
            assert value is not None, f"slot {row.batch_slot} reads position {position}, which was never written"
            assert value != POISON, f"slot {row.batch_slot} reads position {position} from a free page"
            if isinstance(value, str):
                finite = False
            elif finite:
                assert value[0] == previous, f"slot {row.batch_slot} reads another prefix at position {position}"
                previous = value[1]
        if row.batch_slot in self.nan_logits_slots:
            self.nan_logits_slots.discard(row.batch_slot)
            finite = False
        if not finite or chain is None:
            return None
        assert previous == chain[-1], "the pool does not hold what the row computed"
        return chain[-1]
