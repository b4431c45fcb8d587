"""What the scheduler asks of the device for one step, and what comes back: plain ints and bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How the token of a row is chosen. The draw depends on ``seed`` and ``index`` alone."""

    temperature: float
    """0 is greedy."""
    top_k: int
    """0 for all."""
    top_p: float
    seed: int
    index: int
    """Which output token of its request this is, from 0."""


@dataclass(frozen=True, slots=True)
class Row:
    """One request's part in a step: the tokens to compute, and where their KV goes.

    Tokens at positions ``start .. start + n_tokens - 1`` are computed. In every layer all rows of the plan write
    K and V before any row reads, and a row reads positions ``0 .. start + n_tokens - 1`` through its slot's
    block table.
    """

    slot: int
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


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass. Rows are ordered writer before reader."""

    step: int
    rows: tuple[Row, ...]

    @property
    def n_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(row.n_tokens for row in self.rows)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave, row by row in the plan's order."""

    tokens: tuple[int, ...]
    """The sampled id; -1 where none was asked for or the row is not finite."""
    finite: tuple[bool, ...]
    """Whether the row's last hidden state and logits are finite."""


class Pending(Protocol):
    """A launched step."""

    def result(self) -> StepResult:
        """Waits for the step. Raises ``DeviceError`` if it failed, as do all steps launched after it and
        before the failure was seen."""
        ...


class Executor(Protocol):
    """The device, as the loop sees it. Steps run in the order of their launches."""

    @property
    def n_pages(self) -> int:
        """Pages in the pool."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        ...

    def launch(self, plan: StepPlan) -> Pending:
        """Starts a step without waiting for those before it. Raises ``DeviceError``."""
        ...
