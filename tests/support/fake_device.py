"""A device without numbers: a KV slot holds what it was written for, and every read checks it.

The value of a slot is a link of a hash chain over (namespace, tokens up to there), so a row that reads another
prefix's page, a page that was freed, or one that is not written yet is found at once.  The sampled token is a
function of the whole chain, which ``answer`` computes without any device.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from radixkv.errors import DeviceError
from radixkv.runtime.plan import Row, StepPlan, StepResult
from radixkv.tree.node import Namespace

VOCAB_SIZE = 1000
NAN = "nan"
POISON = "poison"


def start(namespace: Namespace) -> int:
    """The chain before the first token."""
    return zlib.crc32(repr(namespace).encode())


def link(previous: int, token: int) -> int:
    """The chain's next link."""
    return hash((previous, token))


def sampled(end: int) -> int:
    """The token that follows a chain."""
    return 100 + end % (VOCAB_SIZE - 100)


def answer(namespace: Namespace, prompt: Sequence[int], n_tokens: int, stop: Sequence[int] = ()) -> list[int]:
    """The right answer, computed naively."""
    end = start(namespace)
    for token in prompt:
        end = link(end, token)
    tokens: list[int] = []
    while len(tokens) < n_tokens and not (tokens and tokens[-1] in stop):
        tokens.append(sampled(end))
        end = link(end, tokens[-1])
    return tokens


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
    slots: dict[tuple[int, int], tuple[int, int] | str] = field(default_factory=dict)
    tables: dict[int, list[int]] = field(default_factory=dict)
    last_token: dict[int, int | None] = field(default_factory=dict)
    _queue: deque[FakePending] = field(default_factory=deque)

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
                self.slots[page, offset] = POISON

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
        chains: list[list[int] | None] = []
        for row in plan.rows:
            table = self.tables.setdefault(row.slot, [])
            del table[row.table_start :]
            table += row.table_pages
        self.broken |= {
            (plan.step, row.slot) for row in plan.rows if row.slot in self.nan_slots | self.nan_logits_slots
        }
        for index, row in enumerate(plan.rows):
            chains.append(self._write(index, row, writer))
            self.computed.append((plan.step, row.slot, row.n_tokens))
        results = [self._read(index, row, chains[index], writer) for index, row in enumerate(plan.rows)]
        for row, end in zip(plan.rows, results, strict=True):
            if row.sampling is not None:
                self.last_token[row.slot] = None if end is None else sampled(end)
        return StepResult(
            tokens=tuple(
                -1 if end is None or row.sampling is None else sampled(end)
                for row, end in zip(plan.rows, results, strict=True)
            ),
            finite=tuple(end is not None for end in results),
        )

    def _slot(self, row: Row, position: int) -> tuple[int, int]:
        page = self.tables[row.slot][position // self.page_size]
        assert page not in self.free_pages, f"slot {row.slot} uses page {page}, which is free"
        return page, position % self.page_size

    def _write(self, index: int, row: Row, writer: dict[tuple[int, int], int]) -> list[int] | None:
        """Writes the row's KV; gives its chain, or None if it is not finite."""
        if row.tokens is None:
            last = self.last_token[row.slot]
            tokens = None if last is None else [last]
        else:
            tokens = [int.from_bytes(row.tokens[i : i + 4], "little") for i in range(0, len(row.tokens), 4)]
            assert len(tokens) == row.n_tokens
        end: int | None = start(self.namespaces[row.slot])
        if row.start:
            before = self.slots.get(self._slot(row, row.start - 1))
            assert before is not None, "KV of the token before was never written"
            assert before != POISON, f"slot {row.slot} continues freed KV"
            end = None if isinstance(before, str) else before[1]
        if row.slot in self.nan_slots or tokens is None:
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
                assert self.slots.get(target) in (None, POISON), f"slot {row.slot} writes over live KV"
                writer[target] = index
                self.slots[target] = value
        self.nan_slots.discard(row.slot)
        return chain

    def _read(
        self, index: int, row: Row, chain: list[int] | None, writer: dict[tuple[int, int], int]
    ) -> int | None:
        """Checks all KV that the row attends to; gives the end of its chain, or None if it is not finite."""
        previous, finite = start(self.namespaces[row.slot]), chain is not None
        for position in range(row.start + row.n_tokens):
            target = self._slot(row, position)
            assert writer.get(target, -1) <= index, "a reader stands before its writer"
            value = self.slots.get(target)
            assert value is not None, f"slot {row.slot} reads position {position}, which was never written"
            assert value != POISON, f"slot {row.slot} reads position {position} from a free page"
            if isinstance(value, str):
                finite = False
            elif finite:
                assert value[0] == previous, f"slot {row.slot} reads another prefix at position {position}"
                previous = value[1]
        if row.slot in self.nan_logits_slots:
            self.nan_logits_slots.discard(row.slot)
            finite = False
        if not finite or chain is None:
            return None
        assert previous == chain[-1], "the pool does not hold what the row computed"
        return chain[-1]
