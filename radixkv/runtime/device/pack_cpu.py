"""A ``StepPlan`` as tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.errors import DeviceError
from radixkv.runtime.device.host_memory import claim
from radixkv.runtime.step.plan import Row, RowSampling, StepPlan

_TOKEN = np.dtype("<i4")


@dataclass(frozen=True)
class Span:
    """One row's tokens within the batch."""

    first: int
    """Index of its first token."""
    n_tokens: int
    start: int
    """That token's position in the sequence."""
    pages: NDArray[np.int32]
    """The pages of positions ``0 .. start + n_tokens - 1``."""

    @property
    def length(self) -> int:
        """Positions that the row's last token reads."""
        return self.start + self.n_tokens


@dataclass(frozen=True)
class Scored:
    """The tokens of one row after each of which another was to be scored."""

    row: int
    first: int
    """Index of the first of them within the batch; the others follow."""
    targets: NDArray[np.int32]
    n_logprobs: int


@dataclass(frozen=True)
class Batch:
    """One step's tokens, row after row. Index tensors are int64."""

    spans: tuple[Span, ...]
    batch_slots: Tensor
    """[rows]"""
    ids: Tensor
    """[tokens]; 0 where the id is still to come from ``last_tokens``."""
    fed_tokens: Tensor
    """Tokens whose id the slot sampled last,"""
    fed_slots: Tensor
    """and their slots."""
    positions: Tensor
    """[tokens]"""
    written_tokens: Tensor
    """Tokens whose K and V are stored,"""
    written_pages: Tensor
    """their pages,"""
    written_offsets: Tensor
    """and their places within the page."""
    last: Tensor
    """[rows]: each row's last token."""
    sampling: tuple[RowSampling | None, ...]
    scored: tuple[Scored, ...]
    copies: tuple[tuple[int, int], ...]
    """Pages (source, destination) to copy before anything is written."""


class Batcher:
    """Packs plans, and keeps the slots' block tables between them.

    A table is changed where a row says so, never rebuilt. Cost: O(tokens + changed pages + pages read), all but the
    first in bulk.

    Raises:
        ConfigError: the tables do not fit into memory.
    """

    def __init__(self, *, page_size: int, max_rows: int, max_model_len: int, n_pages: int) -> None:
        self._page_size = page_size
        self._max_model_len = max_model_len
        self._n_pages = n_pages
        shape = (max_rows, -(-max_model_len // page_size))
        with claim(
            4 * math.prod(shape),
            f"a block table for max_num_seqs {max_rows} and max_model_len {max_model_len}",
            "set one of them lower",
        ):
            self._tables = np.full(shape, -1, dtype=np.int32)
        self._has_history = np.zeros(max_rows, dtype=np.bool_)

    def pack(self, plan: StepPlan) -> Batch:
        """Updates the tables and gives the plan as tensors, which later updates leave alone.

        Raises:
            DeviceError: the plan does not fit the tables, the pool or itself; the tables are as before.
        """
        if not plan.rows:
            raise DeviceError(f"step {plan.step} has no rows")
        self._check_copies(plan)
        for row in plan.rows:
            self._check(plan.step, row)
        for row in plan.rows:
            self._tables[row.batch_slot, row.table_start : row.table_start + len(row.table_pages)] = row.table_pages
            if row.sampling is not None:
                self._has_history[row.batch_slot] = row.sampling.has_penalties
        ends = list(accumulate(row.n_tokens for row in plan.rows))
        spans = tuple(self._span(row, end - row.n_tokens) for row, end in zip(plan.rows, ends, strict=True))
        positions = np.concatenate([np.arange(span.start, span.length) for span in spans])
        pages = np.concatenate(
            [span.pages[np.arange(span.start, span.length) // self._page_size] for span in spans]
        )
        owner = np.repeat([row.write_start for row in plan.rows], [row.n_tokens for row in plan.rows])
        written = np.flatnonzero(positions >= owner)
        ids = np.concatenate(
            [np.zeros(1, _TOKEN) if row.tokens is None else np.frombuffer(row.tokens, _TOKEN) for row in plan.rows]
        )
        fed = [
            (span.first, row.batch_slot) for row, span in zip(plan.rows, spans, strict=True) if row.tokens is None
        ]
        return Batch(
            spans=spans,
            batch_slots=_tensor([row.batch_slot for row in plan.rows]),
            ids=_tensor(ids),
            fed_tokens=_tensor([first for first, _ in fed]),
            fed_slots=_tensor([batch_slot for _, batch_slot in fed]),
            positions=_tensor(positions),
            written_tokens=_tensor(written),
            written_pages=_tensor(pages[written]),
            written_offsets=_tensor(positions[written] % self._page_size),
            last=_tensor(ends) - 1,
            sampling=tuple(row.sampling for row in plan.rows),
            scored=tuple(
                Scored(i, span.first, np.frombuffer(row.scoring.targets, _TOKEN), row.scoring.n_logprobs)
                for i, (row, span) in enumerate(zip(plan.rows, spans, strict=True))
                if row.scoring is not None
            ),
            copies=plan.copies,
        )

    def _span(self, row: Row, first: int) -> Span:
        n_pages = -(-(row.start + row.n_tokens) // self._page_size)
        return Span(first, row.n_tokens, row.start, self._tables[row.batch_slot, :n_pages].copy())

    def _check(self, step: int, row: Row) -> None:
        def require(holds: bool, problem: str) -> None:
            if not holds:
                raise DeviceError(f"step {step}, slot {row.batch_slot}: {problem}")

        n_batch_slots, table_size = self._tables.shape
        end = row.start + row.n_tokens
        table_end = row.table_start + len(row.table_pages)
        require(0 <= row.batch_slot < n_batch_slots, f"the device has {n_batch_slots} slots")
        require(row.n_tokens >= 1 and row.start >= 0, f"{row.n_tokens} tokens from position {row.start}")
        require(end <= self._max_model_len, f"position {end - 1} is beyond max_model_len {self._max_model_len}")
        n_given = 1 if row.tokens is None else len(row.tokens) / _TOKEN.itemsize
        require(n_given == row.n_tokens, f"{n_given} ids for {row.n_tokens} tokens")
        require(
            row.table_start >= 0 and table_end <= table_size, f"table entries up to {table_end} of {table_size}"
        )
        if row.table_pages:
            low, high = min(row.table_pages), max(row.table_pages)
            require(low >= 0 and high < self._n_pages, f"pages {low} to {high} of a pool of {self._n_pages}")
        known = self._tables[row.batch_slot, : -(-end // self._page_size)] >= 0
        known[row.table_start : table_end] = True
        require(bool(known.all()), f"no page is known for some positions below {end}")
        if row.scoring is not None:
            n_targets = len(row.scoring.targets) / _TOKEN.itemsize
            require(
                n_targets in (row.n_tokens, row.n_tokens - 1),
                f"{n_targets:g} tokens to score after {row.n_tokens}",
            )
            require(row.scoring.n_logprobs >= 0, f"{row.scoring.n_logprobs} log-probabilities")
        if row.sampling is not None:
            self._check_sampling(row.batch_slot, row.sampling, require)

    def _check_sampling(self, batch_slot: int, sampling: RowSampling, require: Callable[[bool, str], None]) -> None:
        require(sampling.temperature >= 0.0, f"temperature {sampling.temperature}")
        require(0.0 < sampling.top_p <= 1.0, f"top_p {sampling.top_p}")
        require(0.0 <= sampling.min_p <= 1.0, f"min_p {sampling.min_p}")
        require(sampling.top_k >= 0, f"top_k {sampling.top_k}")
        require(sampling.repetition_penalty > 0.0, f"repetition_penalty {sampling.repetition_penalty}")
        require((sampling.n_logprobs or 0) >= 0, f"{sampling.n_logprobs} log-probabilities")
        if sampling.history is not None:
            n_history = len(sampling.history.tokens) / _TOKEN.itemsize
            n_prompt = sampling.history.n_prompt
            require(
                n_history.is_integer() and 0 <= n_prompt <= n_history,
                f"a history of {n_history:g} tokens, {n_prompt} of them the prompt's",
            )
        elif sampling.has_penalties:
            require(bool(self._has_history[batch_slot]), "penalties without a history")

    def _check_copies(self, plan: StepPlan) -> None:
        pages = [page for copy in plan.copies for page in copy]
        if pages and not 0 <= min(pages) <= max(pages) < self._n_pages:
            raise DeviceError(
                f"step {plan.step} copies pages {min(pages)} to {max(pages)} of a pool of {self._n_pages}"
            )
        if len({destination for _, destination in plan.copies}) < len(plan.copies):
            raise DeviceError(f"step {plan.step} copies two pages to one")


def _tensor(values: list[int] | NDArray[np.integer]) -> Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.int64))
