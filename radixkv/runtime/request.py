"""A request in the runtime: what it asks for, where it stands, and the pages that it holds.

A request with several answers is several ``Request``s of one id. One of them, the leader, computes the prompt; the
others follow it, and *fork* from it when its first token is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from radixkv.errors import RequestError
from radixkv.runtime.cache.block_table import BlockTable
from radixkv.runtime.step.plan import History, Row, RowSampling, Scoring
from radixkv.tree.node import TOKEN_BYTES, Namespace
from radixkv.wire import PromptLogprobs, TokenLogprobs

GREEDY = RowSampling(temperature=0.0, top_k=0, top_p=1.0, seed=0, index=0)


class Phase(Enum):
    """Where a request stands. In the last two it *drains*: a step that is launched, or will be, uses its pages."""

    FOLLOWING = "following"
    """Another choice computes its prompt; it has neither slot nor pages."""
    WAITING = "waiting"
    RUNNING = "running"
    RETRACTED = "returning"
    """Retracted: goes back to the queue once no launched step has a row of it."""
    ENDED = "ended"
    """Its terminal message is out: its pages go back once no launched step has a row of it."""


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and its answer."""

    id: str
    namespace: Namespace
    tokens: bytearray
    """Every known token, prompt then answer, as little-endian int32."""
    n_prompt: int
    max_tokens: int
    """Most tokens of the answer."""
    choice: int = 0
    """Which of the request's answers this is."""
    sampling: RowSampling = GREEDY
    """How its tokens are chosen: what is the same for all; ``banned`` is for those before ``min_tokens`` only."""
    min_tokens: int = 0
    """Least tokens of the answer."""
    stop_token_ids: frozenset[int] = frozenset()
    """The answer ends with the first of these, end-of-sequence included."""
    reads_cache: bool = True
    """False: every prompt token is computed, the first time; the pages still enter the tree."""
    priority: int = 0
    """A lower number goes first."""
    n_prompt_logprobs: int | None = None
    """How many of the likeliest tokens to report beside each of the prompt; None reports nothing."""
    received_at: float = 0.0
    """Seconds on the loop's clock."""

    phase: Phase = Phase.WAITING
    serial: int = 0
    """Order of arrival; kept when the request returns to the queue."""
    block_table: BlockTable | None = None
    """None while it waits: it has no pages then."""
    batch_slot: int = -1
    needs_history: bool = False
    """Whether the device must be told the tokens before its next one, for penalties: its slot is new."""
    leader: Request | None = None
    """The choice that computes the prompt, until this one has it: while this one follows, and then until its first
    row has copied the leader's tail."""
    followers: list[Request] = field(default_factory=list)
    """The choices that wait for this one's first token, in order."""
    n_pending_copies: int = 0
    """Forks that have still to copy its tail."""
    n_scheduled: int = 0
    """Tokens, from the start, whose KV is in the pool or will be by a launched step."""
    n_output_placeholders: int = 0
    """Tokens that launched steps sample and the host does not know yet."""
    n_in_flight: int = 0
    """Launched steps with a row of it."""
    last_step: int = -1
    """The newest step with a row of it."""
    discards_results: bool = False
    """What its launched rows sample is not to be used."""
    bypasses_tree: bool = False
    """It is retried without the tree, after non-finite numbers."""
    max_retry_rows: int | None = None
    """A step of it failed: it is retried in steps of their own, of so many rows at most."""
    n_passed_over: int = 0
    """Steps that admitted a younger request while it waited."""
    key: bytes = b""
    """Its known tokens, while it waits."""
    n_matched: int = 0
    """Cached prefix in tokens, when the tree was at ``match_version``."""
    match_version: int = -1
    computed: list[tuple[int, int]] = field(default_factory=list)
    """Prompt positions computed until the first prefill ended, as half-open ranges."""
    n_cached: int | None = None
    """Prompt tokens that it did not compute; known once its first prefill has ended."""
    n_scored: int = 1
    """The first place of the prompt that is not scored yet, where it is to be scored."""
    scheduled_at: float | None = None
    """When the first row of it, or of its leader, was scheduled."""

    @property
    def blocks(self) -> BlockTable:
        """The block table of a request that is running or releasing."""
        assert self.block_table is not None, "a request that is running or releasing has a block table"
        return self.block_table

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first: the least."""
        return self.priority, self.serial

    # These are asked of every row in every step, and so written out: one that asks another takes twice as long.

    @property
    def n_known(self) -> int:
        """Tokens that the host knows."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def n_outputs(self) -> int:
        """Tokens of the answer that the host knows."""
        return len(self.tokens) // TOKEN_BYTES - self.n_prompt

    @property
    def is_decoding(self) -> bool:
        """Whether its next row computes the one token that was sampled last."""
        return self.n_prompt <= self.n_scheduled == len(self.tokens) // TOKEN_BYTES + self.n_output_placeholders - 1

    @property
    def reaches_max_tokens(self) -> bool:
        """Whether the launched steps bring it to ``max_tokens``."""
        return len(self.tokens) // TOKEN_BYTES + self.n_output_placeholders >= self.n_prompt + self.max_tokens

    def make_row(self, start: int, end: int, write_start: int, step: int) -> Row:
        """Its row of a step that will be launched: the tokens ``start .. end - 1``, for which its table has pages.
        O(tokens + new pages), and ``next_sampling`` if the row ends with the last token."""
        blocks, n_known = self.blocks, self.n_known
        samples = end == n_known + self.n_output_placeholders
        row = Row(
            batch_slot=self.batch_slot,
            start=start,
            n_tokens=end - start,
            tokens=bytes(self.tokens[start * TOKEN_BYTES : end * TOKEN_BYTES]) if end <= n_known else None,
            write_start=write_start,
            table_start=blocks.n_on_device,
            table_pages=tuple(blocks.pages[blocks.n_on_device :]),
            sampling=self.next_sampling() if samples else None,
            scoring=self.scoring(start, end),
        )
        blocks.n_on_device = len(blocks.pages)
        if self.n_cached is None and start < self.n_prompt:
            self.computed.append((start, min(end, self.n_prompt)))
        self.n_scheduled = end
        self.n_output_placeholders += samples
        self.n_in_flight += 1
        self.last_step = step
        return row

    def row_done(self, row: Row) -> None:
        """A launched row of it is done or has failed."""
        self.n_in_flight -= 1
        self.n_output_placeholders -= row.sampling is not None

    def next_sampling(self) -> RowSampling:
        """How its next token is drawn. O(1), with penalties O(tokens) the first time in a slot."""
        how, index = self.sampling, len(self.tokens) // TOKEN_BYTES - self.n_prompt + self.n_output_placeholders
        history = None
        if self.needs_history:
            history = History(bytes(self.tokens), self.n_prompt)
            self.needs_history = False
        banned = how.banned if index < self.min_tokens else ()
        return msgspec.structs.replace(how, index=index, banned=banned, history=history)

    def scoring(self, start: int, end: int) -> Scoring | None:
        """What a row of positions ``start .. end - 1`` is to score; None if nothing is left to be scored there."""
        if self.n_prompt_logprobs is None:
            return None
        last = min(end, self.n_prompt - 1)
        if last < max(self.n_scored, start + 1):
            return None
        targets = bytes(self.tokens[(start + 1) * TOKEN_BYTES : (last + 1) * TOKEN_BYTES])
        return Scoring(targets, self.n_prompt_logprobs)

    def take_scores(self, start: int, scores: tuple[TokenLogprobs, ...]) -> PromptLogprobs | None:
        """Of the scores that a row from ``start`` on gave, those that no row gave before, if there are any."""
        first = self.n_scored
        items = list(scores[first - start - 1 :])
        self.n_scored += len(items)
        return PromptLogprobs(self.id, first, items) if items else None

    def take_followers(self, followers: Sequence[Request]) -> None:
        """It leads, and they follow. They refer to each other until they fork or end: nothing collects cycles."""
        self.followers = list(followers)
        for follower in followers:
            follower.phase = Phase.FOLLOWING
            follower.leader = self
            follower.n_cached = 0  # the prompt counts once, with the leader

    def hand_over(self) -> Request:
        """It ends before its first token: its first follower leads, with what is done of the prompt."""
        heir, *heir.followers = self.followers
        self.followers = []
        for follower in heir.followers:
            follower.leader = heir
        heir.leader = None
        heir.phase = Phase.WAITING
        heir.reads_cache = self.reads_cache
        heir.n_prompt_logprobs, heir.n_scored = self.n_prompt_logprobs, self.n_scored
        heir.computed, heir.n_cached = self.computed, None
        heir.scheduled_at = self.scheduled_at
        return heir

    def count_cached(self) -> int:
        """Ends the count of computed prompt tokens; O(chunks), once."""
        n_computed = end = 0
        for first, last in sorted(self.computed):
            n_computed += max(0, last - max(first, end))
            end = max(end, last)
        self.computed.clear()
        self.n_cached = self.n_prompt - n_computed
        return self.n_cached


class Update(msgspec.Struct, frozen=True):
    """What a step's end means for one request: prompt scores, a token, its end."""

    request: Request
    token: int | None = None
    finish_reason: str | None = None
    """``stop`` or ``length``."""
    error: RequestError | None = None
    logprobs: TokenLogprobs | None = None
    """Of the token, if asked for."""
    scores: PromptLogprobs | None = None
