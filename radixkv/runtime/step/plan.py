"""What the scheduler asks of the device for one step, and what comes back: plain ints and bytes.

These are ``msgspec`` structs because hundreds are made for each step: a frozen dataclass takes ten times as long.
"""

from __future__ import annotations

import msgspec


class History(msgspec.Struct, frozen=True):
    """The tokens before the one to choose, for penalties."""

    tokens: bytes
    """Prompt then answer, little-endian int32."""
    n_prompt: int


class RowSampling(msgspec.Struct, frozen=True):
    """How the token of a row is chosen. The draw depends on ``seed`` and ``index`` alone."""

    temperature: float
    """0 is greedy."""
    top_k: int
    """0 for all."""
    top_p: float
    seed: int
    index: int
    """Which output token of its request this is, from 0."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids, and what is added to their logits."""
    banned: tuple[int, ...] = ()
    """Token ids that may not be chosen: ends of the answer, before it has ``min_tokens``."""
    n_logprobs: int | None = None
    """How many of the likeliest tokens to report beside the chosen one; None reports nothing."""
    history: History | None = None
    """Given with penalties on the first row that samples after the slot went to the request; on later rows the
    device goes on from there with the tokens that the slot sampled."""

    @property
    def has_penalties(self) -> bool:
        """Whether the choice depends on the tokens before it."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


class Scoring(msgspec.Struct, frozen=True):
    """Asks how likely given tokens were: those that follow a row's first tokens."""

    targets: bytes
    """Little-endian int32: the token after each of the row's tokens, from the first on; as many as the row's or
    one fewer."""
    n_logprobs: int
    """How many of the likeliest tokens to report beside each."""


class Row(msgspec.Struct, frozen=True):
    """One request's part in a step: the tokens to compute, and where their KV goes.

    Tokens at positions ``start .. start + n_tokens - 1`` are computed. In every layer all rows of the plan write
    K and V before any row reads, and a row reads positions ``0 .. start + n_tokens - 1`` through its slot's
    block table.
    """

    batch_slot: int
    """Index into the device's persistent batch arrays (block table, last sampled token)."""
    start: int
    n_tokens: int
    tokens: bytes | None
    """Their ids, little-endian int32; None: the one token that the slot sampled last, which may still be on
    the device."""
    write_start: int
    """Positions below are computed without a KV write: their page belongs to the tree."""
    table_start: int
    """First index of the slot's block table that ``table_pages`` replaces."""
    table_pages: tuple[int, ...]
    """Pages from ``table_start`` on; entries behind them are stale."""
    sampling: RowSampling | None
    """None: no token is sampled, because more of the prompt follows."""
    scoring: Scoring | None = None


class SharedRun(msgspec.Struct, frozen=True):
    """Rows whose block tables have the same pages at entries ``first_page .. first_page + n_pages - 1``.

    All are rows of one token, which comes behind those pages.
    """

    rows: tuple[int, ...]
    """Two or more places in the plan, ascending."""
    first_page: int
    n_pages: int


class StepPlan(msgspec.Struct, frozen=True):
    """One forward pass. Rows that continue an answer come first; the others are ordered writer before reader."""

    step: int
    rows: tuple[Row, ...]
    copies: tuple[tuple[int, int], ...] = ()
    """Pages (source, destination) that are copied in all layers before any row writes."""
    shared: tuple[SharedRun, ...] = ()
    """What rows share, if the executor wants to know. Runs nest: one that more rows share comes before those that
    fewer of them share behind it. Empty does not say that nothing is shared."""

    @property
    def n_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(row.n_tokens for row in self.rows)
