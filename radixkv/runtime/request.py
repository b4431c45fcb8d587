"""A request in the runtime: what it asks for, where it stands, and the pages that it holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from radixkv.runtime.plan import RowSampling
from radixkv.tree.node import Lease, Namespace

TOKEN_BYTES = 4
"""A token is one little-endian int32."""


class Phase(Enum):
    """Where a request stands. The last two are *draining*: a launched step still uses its pages."""

    WAITING = "waiting"
    RUNNING = "running"
    RETURNING = "returning"
    """Retracted: goes back to the queue once no launched step has a row of it."""
    ENDED = "ended"
    """Its terminal message is out: its pages go back once no launched step has a row of it."""


class Retired(NamedTuple):
    """A page that left a block table for the tree's own page of the same tokens."""

    last_read: int
    """The newest step whose rows know the table as it was."""
    entry: int
    """Where in the table it stood."""
    page: int


@dataclass(slots=True, eq=False)
class Holding:
    """The pages of one request: a lease on a path of the tree, then its tail."""

    lease: Lease | None
    """None: the request neither reads nor fills the tree."""
    table: list[int]
    """The block table: the lease's pages, then the tail."""
    n_leased: int
    """How many of the table's pages belong to the tree."""
    n_sent: int = 0
    """How many entries of the table, from its start, the device knows."""
    retired: list[Retired] = field(default_factory=list)
    """Duplicates that left the table."""

    @property
    def detached(self) -> bool:
        """Whether the lease's path can no longer be found, so that no commit reaches the tree."""
        return self.lease is not None and self.lease.detached


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
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    """The answer ends with the first of these, end-of-sequence included."""
    reads_cache: bool = True
    """False: every prompt token is computed; the pages still enter the tree."""
    received_at: float = 0.0
    """Seconds on the loop's clock."""

    phase: Phase = Phase.WAITING
    serial: int = 0
    """Order of arrival; kept when the request returns to the queue."""
    holding: Holding | None = None
    slot: int = -1
    n_scheduled: int = 0
    """Tokens, from the start, whose KV is in the pool or will be by a launched step."""
    n_sampling: int = 0
    """Tokens that launched steps sample and the host does not know yet."""
    n_in_flight: int = 0
    """Launched steps with a row of it."""
    last_step: int = -1
    """The newest step with a row of it."""
    discards: bool = False
    """What its launched rows sample is not to be used."""
    private: bool = False
    """It is retried without the tree, after non-finite numbers."""
    returned: bool = False
    """It was retracted before, and so needs room for its whole answer to start again."""
    trial_rows: int | None = None
    """Its last step failed: until its next token, most rows of a step that it is in."""
    n_passed: int = 0
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
    scheduled_at: float | None = None
    """When its first row was scheduled."""

    @property
    def n_known(self) -> int:
        """Tokens that the host knows."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def n_outputs(self) -> int:
        """Tokens of the answer that the host knows."""
        return self.n_known - self.n_prompt

    @property
    def n_left(self) -> int:
        """Tokens whose KV must still be computed before the next one can be sampled."""
        return self.n_known + self.n_sampling - self.n_scheduled

    @property
    def is_decoding(self) -> bool:
        """Whether its next row computes the one token that was sampled last."""
        return self.n_left == 1 and self.n_scheduled >= self.n_prompt

    @property
    def is_sampled_out(self) -> bool:
        """Whether the launched steps bring it to ``max_tokens``."""
        return self.n_outputs + self.n_sampling >= self.max_tokens

    def next_sampling(self) -> RowSampling:
        """How its next token is drawn."""
        return RowSampling(self.temperature, self.top_k, self.top_p, self.seed, self.n_outputs + self.n_sampling)

    def count_cached(self) -> int:
        """Ends the count of computed prompt tokens; O(chunks), once."""
        n_computed = end = 0
        for first, last in sorted(self.computed):
            n_computed += max(0, last - max(first, end))
            end = max(end, last)
        self.computed.clear()
        self.n_cached = self.n_prompt - n_computed
        return self.n_cached
