"""The plan of a step: what the scheduler tells the device to compute, as plain ints and bytes.

The classes of this module are ``msgspec`` structs because a step creates hundreds of them: a frozen dataclass takes
ten times as long. A plan can be sent to another process: encoded as arrays, structs take a quarter of the bytes of
maps.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import msgspec

from radixkv.errors import InvariantError
from radixkv.wire.messages import Pooling


class History(msgspec.Struct, frozen=True, array_like=True):
    """The tokens before the one to sample, which penalties depend on."""

    tokens: bytes
    """Prompt then output, little-endian int32."""
    n_prompt: int
    """Tokens of the prompt."""


class RowSampling(msgspec.Struct, frozen=True, array_like=True):
    """How a row's token is sampled. The random number depends on ``seed`` and ``index`` only."""

    temperature: float
    """0 means greedy."""
    top_k: int
    """0 means all tokens."""
    top_p: float
    seed: int
    index: int
    """Index of the token in the request's output; that of the first one in a row with drafts."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of token id and bias; the bias is added to the token's logit."""
    banned: tuple[int, ...] = ()
    """Token ids that must not be sampled: those that would end the output before ``min_tokens``."""
    n_logprobs: int | None = None
    """How many of the most likely tokens to report with the sampled one; None reports no logprobs."""
    is_masked: bool = False
    """Whether ``LaunchedStep.sample`` gets a mask of the tokens that may be sampled."""
    history: History | None = None
    """With penalties, set on the first row that samples in a new batch slot. For later rows the device appends the
    tokens that it samples in that batch slot."""

    @property
    def has_penalties(self) -> bool:
        """Whether the logits depend on the tokens before."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


class Scoring(msgspec.Struct, frozen=True, array_like=True):
    """Request for prompt logprobs: the log-probabilities of the prompt tokens that follow a row's tokens."""

    targets: bytes
    """The token after each of the row's tokens, little-endian int32; that of the last may be left out."""
    n_logprobs: int
    """How many of the most likely tokens to report with each target."""


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One request's part of a step: the tokens to compute and the pages that hold their KV.

    Computes the tokens at positions ``start .. start + n_tokens - 1``. In every layer, all rows of the plan write K
    and V before any row reads. A row reads positions ``0 .. start + n_tokens - 1`` through the block table of its
    batch slot, so it may read KV that another row of the same step writes. Where all layers have windows, it reads
    nothing of the pages behind the window of its first token: their entries may name pages of other requests.
    """

    batch_slot: int
    """Index into the device's persistent batch (block tables, last sampled tokens, histories)."""
    start: int
    """First position to compute."""
    n_tokens: int
    """Number of positions to compute."""
    tokens: bytes | None
    """Ids of the tokens to compute, little-endian int32. None means the one token that the batch slot sampled last,
    which may still be on the device only."""
    write_start: int
    """First position whose KV is written. Earlier positions are computed without a write: their pages belong to the
    tree."""
    table_start: int
    """First entry of the batch slot's block table that ``table_pages`` replaces. Entries before it keep
    what successful steps stored there, even for an earlier request in the batch slot."""
    table_pages: tuple[int, ...]
    """New entries of the block table from ``table_start`` on; any entries after these are stale."""
    sampling: RowSampling | None
    """None samples no token, because more known tokens follow."""
    scoring: Scoring | None = None
    """None computes no prompt logprobs."""
    n_drafts: int = 0
    """How many of the last tokens are drafts: guesses of the tokens that follow the one before them. A token is
    sampled at the position before each draft, and at the last position."""
    pooling: Pooling | None = None
    """What to report of the last position, of a row that samples no token; None reports nothing."""
    window_start: int = 0
    """First entry of the batch slot's window block table that ``window_pages`` replaces. Layers with windows write
    K and V of all positions, and read those from the window of its first token on."""
    window_pages: tuple[int, ...] = ()
    """New entries of the window block table, where layers with windows have pages of their own. Any entries after
    these, and those behind the window, are stale."""
    adapter: str = ""
    """Digest of the adapter that changes the model for this row; empty: none does."""
    adapter_start: int = 0
    """Position from which on it does, at or before the row's last one."""
    n_skipped: int = 0
    """Pages before ``start`` that its block table leaves out, and to which it does not attend: from ``start`` on,
    position ``p`` is in entry ``p // page_size - n_skipped``."""
    scored_pages: tuple[int, ...] = ()
    """Pages of its request to score after the step, see ``StepResult.page_scores``."""

    @property
    def reports_states(self) -> bool:
        """Whether what it reports needs hidden states, and not only the logits of sampled positions."""
        return self.scoring is not None or (self.pooling is not None and not self.pooling.token_ids)

    def samplings(self) -> tuple[RowSampling | None, ...]:
        """Returns how the token of each sampled position is sampled. O(1 + drafts)."""
        if self.sampling is None or not self.n_drafts:
            return (self.sampling,)
        first = self.sampling.index
        return tuple(msgspec.structs.replace(self.sampling, index=first + n) for n in range(1 + self.n_drafts))


class SharedRun(msgspec.Struct, frozen=True, array_like=True):
    """A run of pages shared by rows, which attention can read once for all of them.

    The block tables of these rows have the same pages at entries ``first_page .. first_page + n_pages - 1``. Each
    row computes one token, at a position after these pages.
    """

    rows: tuple[int, ...]
    """Indices of two or more rows of the plan, ascending."""
    first_page: int
    """First block table entry of the run."""
    n_pages: int
    """Length of the run in pages."""


class StateFork(NamedTuple):
    """A batch slot goes on from the state that another one has before the step."""

    source: int
    batch_slot: int


class StateLoad(NamedTuple):
    """A batch slot goes on from the state in a slot of states."""

    slot: int
    batch_slot: int


class StateSave(NamedTuple):
    """A slot of states gets the state of a batch slot after the tokens before ``position``."""

    batch_slot: int
    position: int
    """From the first one of its row to the one after the last."""
    slot: int


class StepPlan(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One forward pass."""

    step: int
    """Number of the step; steps count from 0."""
    rows: tuple[Row, ...]
    """Decode rows first, then prefill rows, each writer of a shared page before its readers."""
    copies: tuple[tuple[int, int], ...] = ()
    """Page copies (source, destination), done in all layers before any row writes. No source is a destination.
    A row may start within a page that was copied: it then overwrites the rest of the page."""
    shared_runs: tuple[SharedRun, ...] = ()
    """Runs of pages that decode rows share, if the executor uses them. Runs nest: a run of more rows comes before
    the runs that some of those rows share after it. Empty does not mean that no pages are shared."""
    runs_id: int = 0
    """Number of ``shared_runs``. Plans with the same number have the same runs, so that a device can cache what it
    plans for them."""
    is_masked: bool = False
    """Whether any row is masked, so that its token is sampled by ``LaunchedStep.sample``."""
    n_decode: int = 0
    """Leading rows that attention computes as decode rows: each computes one token, and its drafts. The others are
    of prompts."""
    n_drafts: int = 0
    """Drafts of all rows."""
    state_loads: tuple[StateLoad, ...] = ()
    """States of recurrent layers that batch slots take from slots of states before any row is computed."""
    state_saves: tuple[StateSave, ...] = ()
    """States of recurrent layers that slots of states take from batch slots, each when a row comes to a position.
    Those of a row are in order, and no two go to one slot."""
    window_copies: tuple[tuple[int, int], ...] = ()
    """Copies of window pages, as ``copies``."""
    state_forks: tuple[StateFork, ...] = ()
    """States of recurrent layers that batch slots take from others, in this order, before ``state_loads``. Neither
    needs a row in the step."""

    def __post_init__(self) -> None:
        """Raises ``InvariantError`` if a copy's source is a destination: copies may run in any order. O(copies)."""
        for copies in (self.copies, self.window_copies):
            if copies:
                sources, destinations = (set(pages) for pages in zip(*copies, strict=True))
                if not sources.isdisjoint(destinations):
                    raise InvariantError(
                        f"pages {sorted(sources & destinations)} are copied from and copied to in a step"
                    )

    def samplings(self) -> list[RowSampling | None]:
        """Returns how the token of each sampled position is sampled, row after row. O(rows + drafts)."""
        if not self.n_drafts:
            return [row.sampling for row in self.rows]
        return [sampling for row in self.rows for sampling in row.samplings()]

    def first_positions(self) -> Sequence[int]:
        """Returns the index of each row's first sampled position. O(1), and O(rows) with drafts."""
        if not self.n_drafts:
            return range(len(self.rows))
        return list(accumulate([1 + row.n_drafts for row in self.rows[:-1]], initial=0))

    def scored_pages(self) -> list[int]:
        """Returns the pages to score after the step, row after row. O(rows + those pages)."""
        return [page for row in self.rows if row.scored_pages for page in row.scored_pages]

    def without_sampling(self) -> StepPlan:
        """Returns the plan for a rank that does not sample: its rows have no sampling settings. O(rows)."""
        replace = msgspec.structs.replace
        return replace(self, rows=tuple([replace(row, sampling=None) for row in self.rows]))

    @property
    def n_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(row.n_tokens for row in self.rows)

    @property
    def n_prompt_tokens(self) -> int:
        """Tokens that rows of prompts compute."""
        return self.n_tokens - self.n_decode - self.n_drafts
