"""State of one choice of a request in the runtime.

A request with ``n`` choices becomes ``n`` objects of class ``Request`` with the same id. One of them, the *leader*,
computes the prompt. The others *follow* it, and *fork* its block table once its first output token is known. See
docs/decisions/0006-forks.md. With a ``Continuation`` the choices go on together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import msgspec

from radixkv.errors import RequestError
from radixkv.runtime.cache.block_table import BlockTable
from radixkv.runtime.cache_use_record import CacheUseRecord
from radixkv.runtime.protocols.request import Constraint, Continuation, KVEviction, Observer
from radixkv.runtime.step.plan import History, Row, RowSampling, Scoring
from radixkv.settings.tenants import OPERATOR
from radixkv.tree.node import TOKEN_BYTES, Namespace
from radixkv.wire.cache_use import CacheUse
from radixkv.wire.messages import CacheMiss, NewTokens, Pooling, PromptLogprobs, TokenLogprobs, pack_tokens

GREEDY = RowSampling(temperature=0.0, top_k=0, top_p=1.0, seed=0, index=0)


class Phase(Enum):
    """Scheduling state of a request.

    A preempted or finished request that still has a block table is *releasing*: it keeps its pages while launched
    steps, or pending copies of its forks, use them.

    Who sets a phase:

    * a ``Queue``: WAITING, for each request that is added;
    * the loop: GATED, and FINISHED for a request that the gate holds;
    * ``Scheduler``: FOLLOWING for a new request's followers, and FINISHED for a request without pages;
    * ``RunningRequests``: RUNNING; PREEMPTED, and then PAUSED if it is paused; FINISHED for a request with pages;
    * ``Tiers``: LOADING;
    * a continuation: FINISHED for all its choices.
    """

    GATED = "gated"
    """Held by the gate: the scheduler does not know it until its constraint is made."""
    FOLLOWING = "following"
    """Its leader computes the prompt; it has neither a batch slot nor pages."""
    WAITING = "waiting"
    """In the waiting queue, without a batch slot or pages."""
    LOADING = "loading"
    """Out of the waiting queue until pages of its prompt are copied from the host tier; without a batch slot."""
    RUNNING = "running"
    """Has a batch slot and a block table."""
    PREEMPTED = "preempted"
    """Returns to the waiting queue once its pages are released."""
    PAUSED = "paused"
    """Preempted while it is paused: without a batch slot or pages until its continuation lets it go on."""
    FINISHED = "finished"
    """Has ended; it is releasing if it still has a block table."""


@dataclass(slots=True)
class Recovery:
    """What a request has lost by preemptions and failures, and how it is computed again."""

    n_lost: int = 0
    """Leading tokens whose KV it had when it was preempted for lack of pages: the most of all times."""
    discards_results: bool = False
    """Whether to ignore the results of its launched rows."""
    bypasses_tree: bool = False
    """Whether it is computed without the tree: a canary's, or after a row with non-finite values."""
    is_retried: bool = False
    """Whether it runs in steps of its own: a step with a row of it failed, and it has not decoded a token since."""


@dataclass(slots=True)
class QueueRank:
    """What the place of a request in the waiting queue depends on, beside its order."""

    n_passed_over: int = 0
    """Steps that admitted a request later in order while this one waited."""
    n_matched: int = 0
    """Length of the cached prefix in tokens, at ``match_version`` of the tree."""
    match_version: int = -1
    """Version of the tree for which ``n_matched`` holds."""


class FirstRow(NamedTuple):
    """When the first row of a prompt was scheduled, and why no more of the prompt was cached then."""

    scheduled_at: float
    """On the scheduler's clock."""
    miss: CacheMiss | None
    """None if less than a page was missing."""


class ActiveAdapter(NamedTuple):
    """The adapter that acts on a request, and from where on."""

    digest: str = ""
    """Empty: none acts."""
    start: int = 0
    """First position on which it acts."""
    token: bytes = b""
    """Of an activated LoRA: the token at ``start``, little-endian int32, where ``Request.known_key`` has a mark."""


NO_ADAPTER = ActiveAdapter()


@dataclass(slots=True)
class PromptScoring:
    """The logprobs of prompt tokens that a request reports."""

    n_logprobs: int
    """How many of the most likely tokens to report with each prompt token."""
    end: int = 1
    """First prompt position whose logprobs were not reported yet; the first token has none."""

    def of_row(self, request: Request, start: int, end: int) -> Scoring | None:
        """Returns what a row of positions ``start .. end - 1`` has to compute; None if nothing. O(end - start)."""
        last = min(end, request.n_prompt - 1)
        if last < max(self.end, start + 1):
            return None
        return Scoring(request.tokens(start + 1, last + 1), self.n_logprobs)

    def take(self, request: Request, start: int, logprobs: tuple[TokenLogprobs, ...]) -> PromptLogprobs | None:
        """Returns those of a row's prompt logprobs that were not reported before, if any, and counts them.

        Args:
            request: the row's.
            start: first position of the row.
            logprobs: the logprobs of the tokens from ``start + 1`` on.
        """
        first = self.end
        items = list(logprobs[first - start - 1 :])
        self.end += len(items)
        return PromptLogprobs(request.id, first, items) if items else None


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and one output; a request with several choices is several of these."""

    id: str
    namespace: Namespace
    known_key: bytearray
    """The *key* of all known tokens, prompt then output, which the tree compares: little-endian int32, with a mark
    in place of a token if an activated LoRA acts on them, see ``tree.marks``. ``tokens`` returns the tokens.

    A choice that follows has none. It gets the prompt from its leader when it forks or leads, so that a waiting
    request holds its prompt once."""
    n_prompt: int
    """Tokens of the prompt."""
    max_tokens: int
    """Maximum number of output tokens."""
    sender: str = OPERATOR
    """Who has sent it."""
    adapter: ActiveAdapter = NO_ADAPTER
    """What changes the model for it."""
    choice: int = 0
    """Index of the choice in its request."""
    sampling: RowSampling = GREEDY
    """Sampling settings of all its tokens; ``next_sampling`` adds what differs from token to token. ``banned``
    applies only before ``min_tokens``."""
    min_tokens: int = 0
    """Minimum number of output tokens."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the output, end-of-sequence tokens included."""
    reads_cache: bool = True
    """False computes every prompt token once, without the cache; its pages are still added to the tree."""
    is_canary: bool = False
    """Whether it is a check of the cache, which no statistics count."""
    order: tuple[int, int] = (0, 0)
    """Sort key of the schedule, the smallest goes first: priority, which falls when a request ages in the waiting
    queue, then order of arrival, which a preempted request keeps."""
    uses_tiers: bool = True
    """Whether its pages may be stored in the host tier and loaded from it; False after a load has failed."""
    prompt_scoring: PromptScoring | None = None
    """Which prompt logprobs to report; None reports none."""
    pooling: Pooling | None = None
    """What to report of the prompt's last position; its report is then the one output, in place of a token."""
    constraint: Constraint | None = None
    """What its output must obey, in its state after all known tokens; None if any token may follow."""
    continuation: Continuation | None = None
    """What decides how all its choices go on; None if sampled tokens do."""
    kv_eviction: KVEviction | None = None
    """What drops pages of it while it runs; None: it keeps all of them."""
    observers: tuple[Observer, ...] = ()
    """The branches that it has chosen, which follow it; all its choices have the same."""
    received_at: float = 0.0
    """When the request arrived, in seconds of the loop's clock."""

    phase: Phase = Phase.WAITING
    block_table: BlockTable | None = None
    """None while it has no pages."""
    batch_slot: int = -1
    """Index into the device's persistent batch; -1 while it has none."""
    needs_history: bool = False
    """Whether its next sampled row must carry ``History``: it has penalties and a new batch slot."""
    leader: Request | None = None
    """The choice that computes its prompt, or from which it is forked: set while it follows, and after a fork
    until the leader's tail is copied."""
    followers: list[Request] = field(default_factory=list)
    """Choices that wait for this one's first output token, in order."""
    n_pending_copies: int = 0
    """Forks that have not yet copied its tail, so that its pages must not be freed."""
    n_scheduled: int = 0
    """Leading tokens whose KV is in the pool, or will be once the launched steps are done."""
    n_output_placeholders: int = 0
    """Output tokens that launched steps sample, or what they pool, and the host does not know yet."""
    is_paused: bool = False
    """Whether it has no rows until its continuation lets it go on."""
    n_in_flight: int = 0
    """Launched steps that have a row of it."""
    last_step: int = -1
    """The newest launched step that has a row of it."""
    recovery: Recovery = field(default_factory=Recovery)
    """What it has lost, and how it is computed again."""
    key: bytes = b""
    """``lookup_key``, to match against the tree; set only while the request waits."""
    rank: QueueRank = field(default_factory=QueueRank)
    """What its place in the waiting queue depends on."""
    cache_use: CacheUseRecord = field(default_factory=CacheUseRecord)
    """Where the KV of its prompt came from; counted with the first output token."""
    first_row: FirstRow | None = None
    """Its first row, or its leader's; None until that is scheduled."""

    @property
    def blocks(self) -> BlockTable:
        """The block table; only of a request that is running or releasing its pages."""
        assert self.block_table is not None, "only a running or releasing request has a block table"
        return self.block_table

    @property
    def prompt_key(self) -> bytearray:
        """A copy of the prompt's key, little-endian int32. O(tokens)."""
        return self.known_key[: self.n_prompt * TOKEN_BYTES]

    @property
    def lookup_key(self) -> bytearray:
        """The key of the tokens whose KV it may read from the cache: all known ones, and with an eviction those
        before the first drop. Others may have left the KV of later ones, which is not what its answer reads.

        Not to be changed. O(1), with an eviction O(tokens).
        """
        if self.kv_eviction is None:
            return self.known_key
        return self.known_key[: self.kv_eviction.exact_end(self.n_prompt) * TOKEN_BYTES]

    @property
    def priority(self) -> int:
        """Scheduling priority; a lower value goes first."""
        return self.order[0]

    @property
    def serial(self) -> int:
        """Order of arrival."""
        return self.order[1]

    # The properties below run for every row of every step. None calls another: that would double the time.

    @property
    def n_known(self) -> int:
        """Tokens that the host knows, prompt and output."""
        return len(self.known_key) // TOKEN_BYTES

    @property
    def n_outputs(self) -> int:
        """Output tokens that the host knows."""
        return len(self.known_key) // TOKEN_BYTES - self.n_prompt

    @property
    def is_decoding(self) -> bool:
        """Whether its next row is a decode row, which computes only the token sampled last."""
        return (
            self.n_prompt <= self.n_scheduled == len(self.known_key) // TOKEN_BYTES + self.n_output_placeholders - 1
        )

    @property
    def has_all_rows(self) -> bool:
        """Whether it needs no other row for now: the launched steps compute the output up to ``max_tokens``, or all
        known tokens, of which a continuation chooses the next one."""
        if self.continuation is not None:
            return self.n_scheduled == len(self.known_key) // TOKEN_BYTES
        return len(self.known_key) // TOKEN_BYTES + self.n_output_placeholders >= self.n_prompt + self.max_tokens

    @property
    def max_drafts(self) -> int:
        """How many drafts its next row may have at most, if all its tokens are known.

        The row's sampling holds for all its positions, so drafts end where ``min_tokens`` do. A request has none if
        its logits depend on more than the KV before them, if it drops pages, or if a failure has set it apart.
        """
        recovery = self.recovery
        if (
            self.continuation is not None
            or self.kv_eviction is not None
            or self.is_canary
            or self.sampling.has_penalties
            or recovery.is_retried
            or recovery.bypasses_tree
        ):
            return 0
        n_outputs = self.n_outputs
        return (self.min_tokens if n_outputs < self.min_tokens else self.max_tokens) - n_outputs - 1

    def tokens(self, start: int, end: int) -> bytes:
        """Returns the tokens of positions ``start .. end - 1``, little-endian int32. O(tokens)."""
        tokens, mark = bytes(self.known_key[start * TOKEN_BYTES : end * TOKEN_BYTES]), self.adapter.start - start
        if not self.adapter.token or not 0 <= mark < end - start:
            return tokens
        return tokens[: mark * TOKEN_BYTES] + self.adapter.token + tokens[(mark + 1) * TOKEN_BYTES :]

    def make_row(self, start: int, end: int, write_start: int, step: int, drafts: bytes = b"") -> Row:
        """Returns its row of a step that will be launched, and updates its state for the launch.

        Drafts count as scheduled once they are accepted: until then the row stands for its other tokens only.

        O(tokens + new pages), and ``next_sampling`` if the row ends with the last token.

        Args:
            start: first position to compute.
            end: position after the last one. The block table has pages for all of them, and for the drafts.
            write_start: first position whose KV to write; the pages before it belong to the tree.
            step: number of the step.
            drafts: guesses of the tokens that follow, little-endian int32; none unless all tokens are known.
        """
        blocks, n_known, adapter = self.blocks, self.n_known, self.adapter
        window_start, window_pages = blocks.window.take_news() if blocks.window.pages else (0, ())
        n_drafts = len(drafts) // TOKEN_BYTES
        is_last = end == n_known + self.n_output_placeholders
        table_pages = blocks.unsent_pages() if blocks.skipped else tuple(blocks.pages[blocks.n_on_device :])
        samples = is_last and self.pooling is None
        row = Row(
            batch_slot=self.batch_slot,
            start=start,
            n_tokens=end - start + n_drafts,
            tokens=self.tokens(start, end) + drafts if end <= n_known else None,
            write_start=write_start,
            table_start=blocks.n_on_device,
            table_pages=table_pages,
            sampling=self.next_sampling() if samples else None,
            scoring=None if self.prompt_scoring is None else self.prompt_scoring.of_row(self, start, end),
            n_drafts=n_drafts,
            pooling=self.pooling if is_last else None,
            window_start=window_start,
            window_pages=window_pages,
            adapter=adapter.digest if adapter.start < end else "",
            adapter_start=adapter.start,
            n_skipped=len(blocks.skipped),
            scored_pages=() if self.kv_eviction is None else self.kv_eviction.pages_to_score(blocks, end),
        )
        blocks.n_on_device += len(table_pages)
        if start < self.n_prompt:
            self.cache_use.note("computed", start, min(end, self.n_prompt))
        self.n_scheduled = end
        self.n_output_placeholders += is_last
        self.n_in_flight += 1
        self.last_step = step
        return row

    def row_done(self, row: Row) -> None:
        """Updates its state after a launched row of it is done or has failed."""
        self.n_in_flight -= 1
        self.n_output_placeholders -= row.sampling is not None or row.pooling is not None

    def next_sampling(self) -> RowSampling:
        """Returns the sampling settings of its next token. O(1); with penalties O(tokens) once per batch slot."""
        settings = self.sampling
        index = len(self.known_key) // TOKEN_BYTES - self.n_prompt + self.n_output_placeholders
        history = None
        if self.needs_history:
            history = History(self.tokens(0, self.n_known), self.n_prompt)
            self.needs_history = False
        # The mask of a masked row has the bans, because it must not become empty.
        banned = settings.banned if index < self.min_tokens and not settings.is_masked else ()
        return msgspec.structs.replace(settings, index=index, banned=banned, history=history)

    def set_followers(self, followers: Sequence[Request]) -> None:
        """Makes it the leader of ``followers``.

        Leader and follower refer to each other until the follower forks or ends. A fork or an abort must clear both
        references, because the cyclic garbage collector is off.
        """
        self.followers = list(followers)
        for follower in followers:
            follower.phase = Phase.FOLLOWING
            follower.leader = self
            follower.cache_use = CacheUseRecord(CacheUse())  # the prompt counts once, with the leader

    def promote_follower(self) -> Request:
        """Makes its first follower the leader, and returns that one; for a leader that ends before its first token.

        The new leader takes over what was computed and reported of the prompt.
        """
        new_leader, *new_leader.followers = self.followers
        self.followers = []
        for follower in new_leader.followers:
            follower.leader = new_leader
        new_leader.leader = None
        new_leader.known_key = self.prompt_key
        new_leader.reads_cache = self.reads_cache
        new_leader.uses_tiers = self.uses_tiers
        new_leader.prompt_scoring = self.prompt_scoring
        new_leader.cache_use, self.cache_use = self.cache_use, CacheUseRecord()
        new_leader.first_row = self.first_row
        return new_leader

    def become_fork(self, parent: Request) -> None:
        """Becomes a copy of ``parent``, for a continuation; it must have neither batch slot nor pages."""
        self.known_key = parent.known_key.copy()
        self.order = parent.priority, self.serial
        self.uses_tiers = parent.uses_tiers
        self.recovery = Recovery()

    def count_prompt(self) -> None:
        """Counts the cache use of its computed prompt, and tells its observers. O(chunks · log chunks)."""
        self.cache_use.count(self.n_prompt)
        for observer in self.observers:
            observer.prompt_counted(self)


class Update(msgspec.Struct, frozen=True):
    """What one step has changed for a request: prompt logprobs, new tokens, its pooling, or the end of its output.

    An update that has only a request says that its prompt is computed.
    """

    request: Request
    tokens: Sequence[int] = ()
    """The new tokens: one, and the accepted drafts."""
    finish_reason: str | None = None
    """``stop`` or ``length`` if the last of the tokens ends the output."""
    error: RequestError | None = None
    """Set if the request fails."""
    logprobs: list[TokenLogprobs] | None = None
    """Logprobs of each token, if requested."""
    output: NewTokens | None = None
    """The part of a message about the whole output, if that came at once, from a continuation."""
    prompt_logprobs: PromptLogprobs | None = None
    pooled: bytes | None = None
    """What its ``Pooling`` asks for, with the end of its output."""

    def new_tokens(self) -> NewTokens:
        """Returns its part of a message about new tokens."""
        return NewTokens(
            id=self.request.id,
            tokens=pack_tokens(self.tokens),
            choice=self.request.choice,
            finish_reason=self.finish_reason,
            stop_token_id=self.tokens[-1] if self.tokens and self.finish_reason == "stop" else None,
            logprobs=self.logprobs,
            pooled=self.pooled,
        )
