"""A fake device: each KV slot holds a hash of the tokens it was written for instead of K and V; reads check it.

The hash of a slot is a link of a chain over the namespace and all tokens up to its position. So a row that reads
another prefix's page, a freed page or an unwritten one fails at once. The sampled token is a function of the
chain's end, the seed, the banned tokens and the row's mask. Logprobs are functions of the chain's end and the
token. ``expected_output`` and ``expected_prompt_logprobs`` compute them without a device.
"""

from __future__ import annotations

import zlib
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from radixkv.errors import DeviceError, DeviceLost
from radixkv.runtime.step.adapters import DeviceAdapters
from radixkv.runtime.step.plan import Row, RowSampling, SharedRun, StepPlan
from radixkv.runtime.step.result import StepResult, TokenMasks
from radixkv.tree.marks import Marks
from radixkv.tree.node import Namespace
from radixkv.wire.messages import Pooling, TokenLogprobs
from support.fake_grammars import END, FakeGrammar

VOCAB_SIZE = 1000
NAN = "nan"
POISON = "poison"
REJECTED = "rejected"
"""The KV of a draft that was not sampled: it may be overwritten, and is never read."""
BEAM_TOKENS = range(100, 140)
"""The tokens that continue beams."""


class KVValue(NamedTuple):
    """What a KV slot holds."""

    previous: int
    """The chain's end before the slot's token."""
    end: int
    """The chain's end after it."""
    n_executed: int
    """Steps that the device had executed when it computed the slot."""
    reader: str | None = None
    """The request of a row that has skipped pages, which alone may read the slot; None: any row may."""


class SkippedPages(NamedTuple):
    """What a row skips of its request."""

    entries: tuple[int, ...]
    """Entries of its request's block table, ascending."""
    ends: tuple[int, ...]
    """The chain's end after each of these pages."""
    owner: str = ""
    """The request."""


ACTIVATED = ("1a" * 32, "2b" * 32)
"""Digests of activated LoRAs."""
INVOCATION = 2
"""The one invocation token of both."""


def mark_of(adapter: str) -> int:
    """Returns what stands in keys for the invocation token of an activated LoRA."""
    (marks := Marks()).add(adapter, [INVOCATION])
    return unpack(marks.key(adapter, array("i", [INVOCATION]).tobytes()).key)[0]


def text_of(key: Sequence[int]) -> list[int]:
    """Returns the tokens of a key."""
    return [INVOCATION if number < 0 else number for number in key]


def key_of(row: Row) -> list[int]:
    """Returns the key of a row's tokens: its adapter acts from the invocation on."""
    key = unpack(row.tokens or b"")
    assert min(key, default=0) >= 0, "the device gets a mark"
    place = row.adapter_start - row.start
    if row.adapter in ACTIVATED and 0 <= place < len(key):
        assert key[place] == INVOCATION, "the adapter acts from another token on"
        key[place] = mark_of(row.adapter)
    return key


def start(namespace: Namespace) -> int:
    """Returns the chain's end before the first token."""
    return zlib.crc32(repr(namespace).encode())


def link(previous: int, token: int) -> int:
    """Returns the chain's end after one more token."""
    return hash((previous, token))


def chain(namespace: Namespace, tokens: Iterable[int]) -> int:
    """Returns the chain's end after the tokens."""
    end = start(namespace)
    for token in tokens:
        end = link(end, token)
    return end


def link_is_next(previous: int, row: Row, links: Sequence[int]) -> bool:
    """Returns whether a row's chain goes on from ``previous``; True if the device alone knows its token."""
    return row.tokens is None or link(previous, key_of(row)[0]) == links[0]


def next_token(
    end: int, seed: int = 0, banned: Container[int] = (), is_allowed: Callable[[int], bool] = lambda _: True
) -> int:
    """Returns the token that is sampled after a chain."""
    token = 100 + (end + seed * 7919) % (VOCAB_SIZE - 100)
    while token in banned or not is_allowed(token):
        token = 100 + (token - 99) % (VOCAB_SIZE - 100)
    return token


def next_output_token(
    end: int, output: Sequence[int], seed: int, banned: Sequence[int], grammar: FakeGrammar | None
) -> int:
    """Returns the token that is sampled after a chain and an output, of those that a grammar allows.

    What is banned is sampled if the grammar allows nothing else.
    """
    if grammar is None:
        return next_token(end, seed, banned)
    allowed = grammar.allowed(output)
    return next_token(end, seed, is_allowed=(allowed - set(banned) or allowed).__contains__)


def logprobs_of(end: int, token: int) -> TokenLogprobs:
    """Returns the logprobs of a token after a chain."""
    return TokenLogprobs(-float(link(end, token) % 10_007), 1, b"", b"")


def page_score(end: int) -> float:
    """Returns the score of a page, of the chain's end after it; some are equal."""
    return float(link(end, 0) % 13)


def pooled_of(end: int, pooling: Pooling) -> bytes:
    """Returns what a row reports of its last position, at the end of a chain."""
    return repr((end, pooling.token_ids)).encode()


def beam_logprobs(end: int) -> dict[int, float]:
    """Returns the logprobs of the tokens with which beams continue a chain, the likeliest first."""
    logprobs = {token: -(link(end, token) % 10_007) / 1024 for token in BEAM_TOKENS}
    return dict(sorted(logprobs.items(), key=lambda item: -item[1]))


def candidates_of(end: int, n_tokens: int) -> TokenLogprobs:
    """Returns the likeliest tokens after a chain, for a beam search."""
    top = list(beam_logprobs(end).items())[:n_tokens]
    ids, logprobs = array("i", [token for token, _ in top]), array("f", [logprob for _, logprob in top])
    return TokenLogprobs(top[0][1], 1, ids.tobytes(), logprobs.tobytes())


class ExpectedBeam(NamedTuple):
    """An answer of a beam search."""

    score: float
    tokens: list[int]
    logprob: float
    reason: str


def expected_beams(
    namespace: Namespace,
    prompt: Sequence[int],
    width: int,
    max_tokens: int,
    stop: Sequence[int],
    length_penalty: float,
    logprobs_after: Callable[[int], Mapping[int, float]] = beam_logprobs,
) -> list[ExpectedBeam]:
    """Returns the answers of a beam search by the rule of Transformers' ``generate``, step by step as there."""
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    finished: list[ExpectedBeam] = []
    for length in range(1, max_tokens + 1):
        continued = [
            (total + logprob, [*tokens, token])
            for total, tokens in beams
            for token, logprob in logprobs_after(chain(namespace, [*prompt, *tokens])).items()
        ]
        continued.sort(key=lambda beam: -beam[0])
        kept = continued[: max(2, 1 + len(stop)) * width]
        ends = [tokens[-1] in stop or length == max_tokens for _, tokens in kept]
        for (total, tokens), is_end in zip(kept[:width], ends, strict=False):
            if is_end:
                reason = "stop" if tokens[-1] in stop else "length"
                finished.append(ExpectedBeam(total / length**length_penalty, tokens, total, reason))
        finished = sorted(finished, key=lambda beam: -beam.score)[:width]
        beams = [beam for beam, is_end in zip(kept, ends, strict=True) if not is_end][:width]
        worst = finished[-1].score if len(finished) == width else -1e9
        if not beams or not beams[0][0] / length**length_penalty > worst:
            break
    return finished


def expected_output(
    namespace: Namespace,
    prompt: Sequence[int],
    n_tokens: int,
    stop: Sequence[int] = (),
    *,
    seed: int = 0,
    min_tokens: int = 0,
    banned: Sequence[int] = (),
    grammar: FakeGrammar | None = None,
) -> list[int]:
    """Returns the correct output of a request, computed naively."""
    end = chain(namespace, prompt)
    tokens: list[int] = []
    while len(tokens) < n_tokens and not (tokens and tokens[-1] in stop):
        banned_now = banned if len(tokens) < min_tokens else ()
        tokens.append(next_output_token(end, tokens, seed, banned_now, grammar))
        if grammar is not None and tokens[-1] == END:
            break
        end = link(end, tokens[-1])
    return tokens


def expected_prompt_logprobs(namespace: Namespace, prompt: Sequence[int]) -> list[TokenLogprobs]:
    """Returns the logprobs of every prompt token but the first."""
    return [
        logprobs_of(chain(namespace, prompt[:position]), text_of(prompt)[position])
        for position in range(1, len(prompt))
    ]


def unpack(tokens: bytes) -> list[int]:
    return array("i", tokens).tolist()


@dataclass
class FakeStep:
    device: FakeDevice
    plan: StepPlan
    done_at: float
    """When the device is done with the step, on its clock."""
    seconds: float
    """How long it takes."""
    is_sampled: bool = False
    masks: dict[int, NDArray[np.int32]] = field(default_factory=dict)
    """By sampled position of the plan."""
    outcome: StepResult | DeviceError | None = None

    def sample(self, masks: TokenMasks | None) -> FakeStep:
        assert not self.is_sampled, "a step is sampled twice"
        self.is_sampled = True
        if masks is not None:
            samplings = self.plan.samplings()
            for position, bits in zip(masks.positions, masks.bits, strict=True):
                sampling = samplings[position]
                assert sampling is not None, "a mask for a row that does not sample"
                assert sampling.is_masked, "a mask for a row without one"
                assert position not in self.masks, "two masks for one position"
                self.masks[position] = bits.copy()
        return self

    @property
    def is_done(self) -> bool:
        return self.device.now >= self.done_at

    def result(self) -> StepResult:
        self.device.now = max(self.device.now, self.done_at)
        while self.outcome is None:
            self.device.run_next()
        if isinstance(self.outcome, DeviceError):
            raise self.outcome
        return self.outcome


@dataclass
class FakeDevice:
    """Runs plans in the order of their launches, each only when its result, or a later one's, is awaited."""

    n_pages: int
    page_size: int
    vocab_size: int = VOCAB_SIZE
    n_states: int | None = None
    """States of a recurrent layer that the tree can have; None: there is no such layer."""
    window_pool: None = None
    """The harness makes the slabs."""
    adapters: DeviceAdapters | None = None
    uses_shared_runs: bool = True
    is_asynchronous: bool = True
    max_split_rows: int | None = None
    """Most rows of a step, if drafts are rows too."""
    window: int | None = None
    """Positions that a token reads, at least 2; None for all."""
    mixed_window: int | None = None
    """Positions that a token reads in the layers with window pages, at least 2; None: there are none."""
    pages_per_slab: int = 1
    """Pages in whose place a window page is."""
    device: str = "fake"
    n_ranks: int = 1
    dtype: str = "none"
    kv_dtype: str = "none"
    namespaces: dict[int, Namespace] = field(default_factory=dict)
    """Namespace of the request in each batch slot; set by the harness, because plans do not have it."""
    free_pages: set[int] = field(default_factory=set)
    """Pages that are free in the cache when a step runs; reading or writing them is an error."""
    fail_steps: set[int] = field(default_factory=set)
    refuse_launches: int = 0
    loss: str | None = None
    """Why the device was lost while it had nothing to compute; None: it was not."""
    pooled_bytes: int = 0
    """Least bytes of what a row reports of its last position; spaces are added."""
    nan_slots: set[int] = field(default_factory=set)
    """Batch slots whose next row computes NaN KV."""
    nan_logits_slots: set[int] = field(default_factory=set)
    """Batch slots whose next row has NaN logits, but finite KV."""
    non_finite_rows: set[tuple[int, int]] = field(default_factory=set)
    """(step, batch slot) of the rows that were made non-finite, unlike those that read NaN from others."""
    trace: list[str] = field(default_factory=list)
    executed: list[StepPlan] = field(default_factory=list)
    computed: list[tuple[int, int, int]] = field(default_factory=list)
    """(step, batch slot, computed tokens) of each row."""
    kv: dict[tuple[int, int], KVValue | str] = field(default_factory=dict)
    has_readers: bool = False
    """Whether it has ever computed a slot that one request alone may read."""
    tables: dict[int, list[int]] = field(default_factory=dict)
    planned_tables: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """The pages that the row of a request reads, by (step, batch slot); set by the harness."""
    planned_skips: dict[tuple[int, int], SkippedPages] = field(default_factory=dict)
    """What a row skips, by (step, batch slot); set by the harness."""
    windows: dict[tuple[int, int], KVValue | str] = field(default_factory=dict)
    """What window pages hold, as ``kv``."""
    window_tables: dict[int, dict[int, int]] = field(default_factory=dict)
    """Window page by batch slot and entry."""
    free_windows: set[int] = field(default_factory=set)
    """Window pages that are free, as ``free_pages``."""
    planned_windows: dict[tuple[int, int], tuple[int, list[int]]] = field(default_factory=dict)
    """First entry and window pages of the row's request, by (step, batch slot); set by the harness."""
    copied_windows: set[tuple[int, int]] = field(default_factory=set)
    """Slots of window pages that hold a copy, which the fork may overwrite."""
    skips: dict[int, SkippedPages | None] = field(default_factory=dict)
    """What the newest row of each batch slot skips."""
    last_token: dict[int, int | None] = field(default_factory=dict)
    states: dict[int, tuple[int, int | None]] = field(default_factory=dict)
    """By batch slot, the position and the chain's end of a recurrent layer's state; None for NaN."""
    tree_states: dict[int, tuple[int, int | None]] = field(default_factory=dict)
    """The same by the slot of the tree."""
    marked: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By batch slot whose newest row has an adapter, the position from which on it acts, and its mark."""
    histories: dict[int, tuple[int, list[int] | None]] = field(default_factory=dict)
    """By batch slot: the prompt's length, and all tokens that penalties count; None after a non-finite row."""
    copied_slots: set[tuple[int, int]] = field(default_factory=set)
    """KV slots that hold a copy, which the fork may overwrite."""
    _queue: deque[FakeStep] = field(default_factory=deque)
    _runs_of: dict[int, tuple[SharedRun, ...]] = field(default_factory=dict)
    """The shared runs of each ``StepPlan.runs_id``."""

    n_closed: int = 0

    now: float = 0.0
    """The clock that the device shares with its host."""
    step_s: float = 0.0
    """Seconds that it takes for a step."""
    busy_until: float = 0.0
    """When it is done with all launched steps."""

    @property
    def has_windows(self) -> bool:
        return self.window is not None or self.mixed_window is not None

    @property
    def splits_drafts(self) -> bool:
        return self.max_split_rows is not None

    def check(self) -> None:
        if self.loss is not None:
            raise DeviceLost(self.loss)

    def close(self) -> None:
        self.n_closed += 1

    def launch(self, plan: StepPlan) -> FakeStep:
        if self.refuse_launches:
            self.refuse_launches -= 1
            raise DeviceError("the launch was refused")
        assert all(step.is_sampled for step in self._queue), "a step is launched before another is sampled"
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan) == plan, (
            "the plan does not survive a wire"
        )
        self.trace.append(f"launch {plan.step}")
        self.busy_until = max(self.now, self.busy_until) + self.step_s
        step = FakeStep(self, plan, self.busy_until, self.step_s)
        self._queue.append(step)
        return step

    def drop_newest(self) -> None:
        """Forgets the newest launched step, whose sampling failed."""
        self._queue.pop()

    def poison(self, pages: Iterable[int]) -> None:
        for page in pages:
            for offset in range(self.page_size):
                self.kv[page, offset] = POISON
                self.copied_slots.discard((page, offset))

    def poison_windows(self, pages: Iterable[int]) -> None:
        for page in pages:
            for offset in range(self.page_size):
                self.windows[page, offset] = POISON
                self.copied_windows.discard((page, offset))

    def run_next(self) -> None:
        step = self._queue.popleft()
        assert step.is_sampled, "the result of a step without its masks"
        self.trace.append(f"result {step.plan.step}")
        if step.plan.step in self.fail_steps:
            for failed in (step, *self._queue):
                failed.outcome = DeviceError(f"step {step.plan.step} failed")
            self._queue.clear()
            return
        step.outcome = self._execute(step.plan, step.masks, step.seconds)
        self.executed.append(step.plan)

    def _execute(self, plan: StepPlan, masks: Mapping[int, NDArray[np.int32]], seconds: float) -> StepResult:
        writer: dict[tuple[int, int], int] = {}
        self._copy(plan)
        for row in plan.rows:
            table = self.tables.setdefault(row.batch_slot, [])
            assert row.table_start <= len(table), "an update leaves a hole in the block table"
            del table[row.table_start :]
            table += row.table_pages
            planned = self.planned_tables.pop((plan.step, row.batch_slot), table)
            assert table == planned, "the device has another block table than the request"
            self.skips[row.batch_slot] = skips = self.planned_skips.pop((plan.step, row.batch_slot), None)
            assert row.n_skipped == (0 if skips is None else len(skips.entries)), "the row skips other pages"
        self._take_windows(plan)
        self._check_shared(plan)
        self.non_finite_rows |= {
            (plan.step, row.batch_slot)
            for row in plan.rows
            if row.batch_slot in self.nan_slots | self.nan_logits_slots
        }
        assert len({save.slot for save in plan.state_saves}) == len(plan.state_saves), "two states go to one slot"
        for source, batch_slot in plan.state_forks:
            self.states[batch_slot] = self.states[source]
        self.states |= {load.batch_slot: self.tree_states[load.slot] for load in plan.state_loads}
        chains: list[list[int] | None] = []
        for index, row in enumerate(plan.rows):
            saves = {save.position: save.slot for save in plan.state_saves if save.batch_slot == row.batch_slot}
            chains.append(self._write(index, row, writer, saves))
            self.computed.append((plan.step, row.batch_slot, row.n_tokens))
        for row, links in zip(plan.rows, chains, strict=True):
            self._write_windows(row, links)
        ends = [self._read(index, row, chains[index], writer) for index, row in enumerate(plan.rows)]
        ends = [end if self._read_windows(row, end) else None for row, end in zip(plan.rows, ends, strict=True)]
        rows: list[tuple[Row, int | None]] = []
        """The sampled positions: the row of each, and the end of its chain."""
        tokens: list[int] = []
        for index, (row, end) in enumerate(zip(plan.rows, ends, strict=True)):
            links = None if end is None else chains[index]
            first = row.n_tokens - 1 - row.n_drafts
            ends_of_row = [None if links is None else links[first + n] for n in range(1 + row.n_drafts)]
            rows += [(row, one) for one in ends_of_row]
            chosen = [
                -1 if sampling is None else self._choose(row.batch_slot, sampling, one, masks.get(len(tokens) + n))
                for n, (sampling, one) in enumerate(zip(row.samplings(), ends_of_row, strict=True))
            ]
            self._reject(row, chosen)
            tokens += chosen
        return StepResult(
            tokens=tuple(tokens),
            finite=tuple(end is not None for end in ends),
            logprobs=tuple(
                None
                if end is None or row.sampling is None or row.sampling.n_logprobs is None
                else (
                    logprobs_of(end, token)
                    if row.sampling.n_logprobs <= 1
                    else candidates_of(end, row.sampling.n_logprobs)
                )
                for (row, end), token in zip(rows, tokens, strict=True)
            ),
            prompt_logprobs=tuple(self._score(row, links) for row, links in zip(plan.rows, chains, strict=True)),
            device_seconds=seconds,
            pooled=tuple(self._pool(row, end) for row, end in zip(plan.rows, ends, strict=True)),
            page_scores=tuple(self._score_page(row, page) for row in plan.rows for page in row.scored_pages),
        )

    def _score_page(self, row: Row, page: int) -> float:
        """Returns the score of a page, which depends on the tokens up to its end."""
        assert page not in self.free_pages, "a free page is scored"
        assert page in self.tables[row.batch_slot], "a row asks for the score of another request's page"
        values = [self.kv.get((page, offset)) for offset in range(self.page_size)]
        are_written = all(isinstance(value, KVValue) or value == NAN for value in values)
        assert are_written, "a page is scored that is not full"
        last = values[-1]
        return page_score(last.end) if isinstance(last, KVValue) else 0.0

    def _pool(self, row: Row, end: int | None) -> bytes | None:
        if row.pooling is None or end is None:
            return None
        assert row.sampling is None, "a row both pools and samples"
        return pooled_of(end, row.pooling).ljust(self.pooled_bytes)

    def _check_shared(self, plan: StepPlan) -> None:
        """Checks the decode rows, and that shared runs match number and block tables, and nest."""
        if plan.shared_runs:
            assert self._runs_of.setdefault(plan.runs_id, plan.shared_runs) == plan.shared_runs, (
                f"number {plan.runs_id} means other shared runs than before"
            )
        assert all(row.n_tokens == 1 + row.n_drafts for row in plan.rows[: plan.n_decode]), (
            "decode rows compute one token and their drafts"
        )
        assert not any(row.n_drafts for row in plan.rows[plan.n_decode :]), "a row of a prompt has drafts"
        assert self.max_split_rows is None or len(plan.rows) + plan.n_drafts <= self.max_split_rows, "too many rows"
        assert plan.n_drafts == sum(row.n_drafts for row in plan.rows), "the plan counts other drafts"
        assert all(row.tokens is not None for row in plan.rows[plan.n_decode :]), "decode rows come first"
        outer: dict[int, list[SharedRun]] = {}
        for run in plan.shared_runs:
            assert len(run.rows) > 1, "a shared run has one row only"
            assert list(run.rows) == sorted(set(run.rows)), "rows ascend"
            end = run.first_page + run.n_pages
            pages = [self.tables[plan.rows[index].batch_slot][run.first_page : end] for index in run.rows]
            assert len(pages[0]) == run.n_pages > 0, "a run reaches beyond the block table"
            assert all(other == pages[0] for other in pages), "rows of a shared run have different pages"
            for index in run.rows:
                assert index < plan.n_decode, "a row of a shared run is not a decode row"
                assert end * self.page_size <= plan.rows[index].start, "a shared run contains the row's own token"
                for before in outer.setdefault(index, []):
                    assert set(run.rows) < set(before.rows), (
                        "a run of fewer rows comes after the run that contains it"
                    )
                    assert before.first_page + before.n_pages <= run.first_page, "runs follow one another"
                outer[index].append(run)

    def _copy(self, plan: StepPlan) -> None:
        """Copies the plan's pages, before any row writes."""
        for source, destination in plan.copies:
            assert source not in self.free_pages, f"page {source} is copied, and free"
            assert destination not in self.free_pages, (
                f"page {source} is copied to page {destination}, which is free"
            )
            for offset in range(self.page_size):
                value = self.kv.get((source, offset))
                assert self.kv.get((destination, offset)) in (None, POISON), "a copy overwrites live KV"
                if value is not None:
                    self.kv[destination, offset] = value
                    self.copied_slots.add((destination, offset))

    def _choose(
        self, batch_slot: int, sampling: RowSampling, end: int | None, bits: NDArray[np.int32] | None
    ) -> int:
        """Returns the next token; -1 if the row is not finite. Checks that penalties count the right tokens."""
        seed = sampling.seed if sampling.temperature else 0
        token = None
        if end is not None and bits is None:
            token = next_token(end, seed, sampling.banned)
        elif end is not None and bits is not None:
            allowed = {int(one) for one in np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))}
            token = next_token(end, seed, sampling.banned, allowed.__contains__)
        if sampling.history is not None:
            assert sampling.has_penalties, "a history without penalties"
            self.histories[batch_slot] = sampling.history.n_prompt, unpack(sampling.history.tokens)
        if sampling.has_penalties:
            n_prompt, known = self.histories[batch_slot]
            if end is not None and known is not None:
                key = list(known)
                if batch_slot in self.marked:
                    place, mark = self.marked[batch_slot]
                    key[place] = mark
                assert chain(self.namespaces[batch_slot], key) == end, (
                    "penalties count other tokens than the row has"
                )
                assert len(known) - n_prompt == sampling.index, "penalties have another prompt length"
            self.histories[batch_slot] = n_prompt, None if known is None or token is None else [*known, token]
        self.last_token[batch_slot] = token
        return -1 if token is None else token

    def _reject(self, row: Row, chosen: Sequence[int]) -> None:
        """Makes the KV unreadable of a row's drafts from the first one on that was not sampled."""
        drafts = unpack(row.tokens)[row.n_tokens - row.n_drafts :] if row.tokens else []
        for n, draft in enumerate(drafts):
            if draft != chosen[n]:
                for position in range(row.start + row.n_tokens - row.n_drafts + n, row.start + row.n_tokens):
                    self.kv[self._slot(row, position)] = REJECTED
                    if self.mixed_window is not None:
                        self.windows[self._window_slot(row, position)] = REJECTED
                break

    @staticmethod
    def _score(row: Row, links: list[int] | None) -> tuple[TokenLogprobs, ...] | None:
        if row.scoring is None or links is None:
            return None
        targets = unpack(row.scoring.targets)
        assert row.n_tokens - 1 <= len(targets) <= row.n_tokens, "the number of targets does not fit the row"
        assert targets, "a row has no targets"
        return tuple(logprobs_of(end, token) for end, token in zip(links, targets, strict=False))

    def _slot(self, row: Row, position: int) -> tuple[int, int]:
        skips = self.skips.get(row.batch_slot)
        n_before = row.n_skipped if skips is None else bisect_left(skips.entries, position // self.page_size)
        page = self.tables[row.batch_slot][position // self.page_size - n_before]
        assert page not in self.free_pages, f"slot {row.batch_slot} uses page {page}, which is free"
        return page, position % self.page_size

    def _write(
        self, index: int, row: Row, writer: dict[tuple[int, int], int], saves: Mapping[int, int]
    ) -> list[int] | None:
        """Writes the row's KV, and its states to the slots of ``saves`` by position; returns its chain, or None if
        it is not finite."""
        if row.tokens is None:
            last = self.last_token[row.batch_slot]
            tokens = None if last is None else [last]
        else:
            tokens = key_of(row)
            assert len(tokens) == row.n_tokens
        if row.adapter:
            self.marked[row.batch_slot] = row.adapter_start, mark_of(row.adapter)
        else:
            self.marked.pop(row.batch_slot, None)
        end: int | None = start(self.namespaces[row.batch_slot])
        if row.start:
            before = self.kv.get(self._slot(row, row.start - 1))
            assert before is not None, "the KV of the previous token was never written"
            assert before != POISON, f"slot {row.batch_slot} continues freed KV"
            assert before != REJECTED, f"slot {row.batch_slot} continues a rejected draft"
            end = None if isinstance(before, str) else before.end
        if self.n_states is not None and row.start:
            position, state = self.states[row.batch_slot]
            assert position == row.start, f"slot {row.batch_slot} continues the state of another position"
            assert None in (end, state) or state == end, f"slot {row.batch_slot} continues another prefix's state"
            end = None if state is None else end
        if row.batch_slot in self.nan_slots or tokens is None:
            end = None
        if row.start in saves:
            self.tree_states[saves[row.start]] = row.start, end
        chain: list[int] | None = [] if end is not None else None
        for offset in range(row.n_tokens):
            value: KVValue | str = NAN
            if end is not None and tokens is not None and chain is not None:
                following = link(end, tokens[offset])
                skips = self.skips.get(row.batch_slot)
                reader = None if skips is None else skips.owner
                self.has_readers |= reader is not None
                value, end = KVValue(end, following, len(self.executed), reader), following
                chain.append(following)
            position = row.start + offset
            if position >= row.write_start:
                target = self._slot(row, position)
                may_write = target in self.copied_slots or self.kv.get(target) in (None, POISON, REJECTED)
                assert may_write, f"slot {row.batch_slot} overwrites live KV"
                self.copied_slots.discard(target)
                writer[target] = index
                self.kv[target] = value
            if position + 1 in saves:
                self.tree_states[saves[position + 1]] = position + 1, end
        self.states[row.batch_slot] = row.start + row.n_tokens, end
        assert all(row.start <= position <= row.start + row.n_tokens for position in saves), (
            "a row has no such state"
        )
        self.nan_slots.discard(row.batch_slot)
        return chain

    def _take_windows(self, plan: StepPlan) -> None:
        """Copies window pages, and takes the changes of the window block tables."""
        for source, destination in plan.window_copies:
            for offset in range(self.page_size):
                value = self.windows.get((source, offset))
                assert self.windows.get((destination, offset)) in (None, POISON), "a copy overwrites a live window"
                if value is not None:
                    self.windows[destination, offset] = value
                    self.copied_windows.add((destination, offset))
        for row in plan.rows if self.mixed_window is not None else ():
            table = self.window_tables.setdefault(row.batch_slot, {})
            table |= dict(enumerate(row.window_pages, row.window_start))
            first, pages = self.planned_windows.pop((plan.step, row.batch_slot), (0, []))
            known = [table.get(entry) for entry in range(first, first + len(pages))]
            assert known == pages, "the device has another window block table than the request"

    def _window_slot(self, row: Row, position: int) -> tuple[int, int]:
        page = self.window_tables[row.batch_slot][position // self.page_size]
        for other in range(page * self.pages_per_slab, (page + 1) * self.pages_per_slab):
            for offset in range(self.page_size):
                assert self.kv.get((other, offset)) in (None, POISON), (
                    "a window page is in the place of a live page"
                )
        return page, position % self.page_size

    def _write_windows(self, row: Row, links: list[int] | None) -> None:
        """Writes the row's K and V of layers with windows: those of all positions."""
        if self.mixed_window is None:
            return
        previous = None
        if row.start:
            before = self.windows.get(self._window_slot(row, row.start - 1))
            assert before not in (None, POISON, REJECTED), "a row continues a window that was never written"
            previous = None if isinstance(before, str) or before is None else before.end
            assert links is None or previous is None or link_is_next(previous, row, links), (
                "a row continues the window of another prefix"
            )
        else:
            previous = start(self.namespaces[row.batch_slot])
        for offset in range(row.n_tokens):
            slot = self._window_slot(row, row.start + offset)
            may_write = slot in self.copied_windows or self.windows.get(slot) in (None, POISON, REJECTED)
            assert may_write, f"slot {row.batch_slot} overwrites a live window"
            self.copied_windows.discard(slot)
            if links is None or previous is None:
                self.windows[slot] = NAN
            else:
                self.windows[slot] = KVValue(previous, links[offset], len(self.executed))
                previous = links[offset]

    def _read_windows(self, row: Row, end: int | None) -> bool:
        """Checks the window pages that a row reads; returns whether all are finite."""
        if self.mixed_window is None:
            return True
        first = max(0, row.start + 1 - self.mixed_window)
        previous = None if first else start(self.namespaces[row.batch_slot])
        finite = True
        for position in range(first, row.start + row.n_tokens):
            value = self.windows.get(self._window_slot(row, position))
            assert value is not None, f"slot {row.batch_slot} reads a window at {position}, which was never written"
            assert value != POISON, f"slot {row.batch_slot} reads a free window page at position {position}"
            assert value != REJECTED, f"slot {row.batch_slot} reads a rejected draft in a window at {position}"
            if isinstance(value, str):
                finite = False
            elif finite:
                assert previous in (None, value.previous), f"slot {row.batch_slot} reads another prefix's window"
                previous = value.end
        assert not finite or end is None or previous == end, "the window pages do not hold what the row computed"
        return finite

    def _read(
        self, index: int, row: Row, chain: list[int] | None, writer: dict[tuple[int, int], int]
    ) -> int | None:
        """Checks all KV that the row attends to; returns the end of its chain, or None if it is not finite."""
        finite = chain is not None
        first = 0 if self.window is None else max(0, row.start + 1 - self.window)
        previous = None if first else start(self.namespaces[row.batch_slot])
        skips = self.skips.get(row.batch_slot) or SkippedPages((), ())
        for position in range(first, row.start + row.n_tokens):
            if position == first or not position % self.page_size:  # a page's entry is looked up once, for speed
                entry = position // self.page_size
                page = -1 if entry in skips.entries else self._slot(row, position)[0]
            if page < 0:
                previous = skips.ends[skips.entries.index(entry)]
                continue
            target = page, position % self.page_size
            assert writer.get(target, -1) <= index, "a row comes before the row that writes what it reads"
            value = self.kv.get(target)
            if isinstance(value, str):
                assert value != POISON, f"slot {row.batch_slot} reads position {position} from a free page"
                assert value != REJECTED, f"slot {row.batch_slot} reads a rejected draft at position {position}"
                finite = False
                continue
            assert value is not None, f"slot {row.batch_slot} reads position {position}, which was never written"
            if finite:
                assert value.reader in (None, skips.owner or None), (
                    f"slot {row.batch_slot} reads what a row computed at position {position} that skipped pages"
                )
                assert previous in (None, value.previous), (
                    f"slot {row.batch_slot} reads another prefix at position {position}"
                )
                previous = value.end
        if row.batch_slot in self.nan_logits_slots:
            self.nan_logits_slots.discard(row.batch_slot)
            finite = False
        if not finite or chain is None:
            return None
        assert previous == chain[-1], "the pool does not hold what the row computed"
        return chain[-1]
