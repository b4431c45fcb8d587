"""Conversion of a ``StepPlan`` into tensors for the CPU device."""

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
from radixkv.runtime.device.memory_check import check_allocation
from radixkv.runtime.device.plan_checks import check_plan
from radixkv.runtime.step.plan import Row, RowSampling, StepPlan

_TOKEN = np.dtype("<i4")


@dataclass(frozen=True)
class RowSpan:
    """The tokens of one row within the packed step."""

    first_token: int
    """Index of the row's first token among the step's tokens."""
    n_tokens: int
    start: int
    """Position of the row's first token in its sequence."""
    pages: NDArray[np.int32]
    """Pages of positions ``0 .. start + n_tokens - 1``."""

    @property
    def length(self) -> int:
        """Number of positions that the row's last token reads, its own included."""
        return self.start + self.n_tokens


@dataclass(frozen=True)
class PromptTargets:
    """The prompt tokens of one row whose logprobs the plan requests."""

    row: int
    first_token: int
    """Index, among the step's tokens, of the token that predicts the first target; the next ones follow it."""
    targets: NDArray[np.int32]
    """Token ids; each is predicted by the token before it."""
    n_logprobs: int
    """Number of likeliest tokens to report beside each target."""


@dataclass(frozen=True)
class PackedStep:
    """The tokens of one step, row after row. All tensors are int64."""

    spans: tuple[RowSpan, ...]
    batch_slots: Tensor
    """[rows]: batch slot of each row."""
    ids: Tensor
    """[tokens]: token ids; 0 for pending tokens."""
    pending_tokens: Tensor
    """[pending]: indices of tokens whose id is the one their batch slot sampled last."""
    pending_slots: Tensor
    """[pending]: batch slots of the pending tokens."""
    positions: Tensor
    """[tokens]: position of each token in its sequence."""
    slot_mapping: Tensor
    """[tokens]: index of each token's K and V in the pool, as ``page * page_size + offset``; -1 stores nothing."""
    last_indices: Tensor
    """[rows]: index of each row's last token."""
    sampling: tuple[RowSampling | None, ...]
    """[rows]: sampling settings; None for rows that sample no token."""
    prompt_targets: tuple[PromptTargets, ...]
    """Requests for prompt logprobs, at most one per row."""
    copies: tuple[tuple[int, int], ...]
    """(source, destination) pages to copy before any token is written."""


class Packer:
    """Packs step plans and keeps the block tables of all batch slots between steps.

    A row's changes are applied to its batch slot's table; tables are never rebuilt. Cost of a step: O(tokens +
    changed pages + pages read), where the pages are copied in bulk.

    Raises:
        ConfigError: the block tables do not fit into memory.
    """

    def __init__(self, *, page_size: int, max_rows: int, max_model_len: int, n_pages: int) -> None:
        self._page_size = page_size
        self._max_model_len = max_model_len
        self._n_pages = n_pages
        shape = (max_rows, -(-max_model_len // page_size))
        with check_allocation(
            4 * math.prod(shape),
            f"a block table for max_num_seqs {max_rows} and max_model_len {max_model_len}",
            "set one of them lower",
        ):
            self._tables = np.full(shape, -1, dtype=np.int32)
        self._has_history = np.zeros(max_rows, dtype=np.bool_)

    def pack(self, plan: StepPlan) -> PackedStep:
        """Updates the block tables and returns the plan as tensors, which later updates do not change.

        Raises:
            DeviceError: the plan is inconsistent or does not fit the tables or the pool; the tables are unchanged.
        """
        check_plan(plan, len(self._tables), self._n_pages)
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
        write_starts = np.repeat([row.write_start for row in plan.rows], [row.n_tokens for row in plan.rows])
        slots = pages.astype(np.int64) * self._page_size + positions % self._page_size
        ids = np.concatenate(
            [np.zeros(1, _TOKEN) if row.tokens is None else np.frombuffer(row.tokens, _TOKEN) for row in plan.rows]
        )
        pending = [
            (span.first_token, row.batch_slot)
            for row, span in zip(plan.rows, spans, strict=True)
            if row.tokens is None
        ]
        return PackedStep(
            spans=spans,
            batch_slots=_tensor([row.batch_slot for row in plan.rows]),
            ids=_tensor(ids),
            pending_tokens=_tensor([token for token, _ in pending]),
            pending_slots=_tensor([batch_slot for _, batch_slot in pending]),
            positions=_tensor(positions),
            slot_mapping=_tensor(np.where(positions >= write_starts, slots, -1)),
            last_indices=_tensor(ends) - 1,
            sampling=tuple(row.sampling for row in plan.rows),
            prompt_targets=tuple(
                PromptTargets(
                    i, span.first_token, np.frombuffer(row.scoring.targets, _TOKEN), row.scoring.n_logprobs
                )
                for i, (row, span) in enumerate(zip(plan.rows, spans, strict=True))
                if row.scoring is not None
            ),
            copies=plan.copies,
        )

    def _span(self, row: Row, first_token: int) -> RowSpan:
        n_pages = -(-(row.start + row.n_tokens) // self._page_size)
        return RowSpan(first_token, row.n_tokens, row.start, self._tables[row.batch_slot, :n_pages].copy())

    def _check(self, step: int, row: Row) -> None:
        def require(is_valid: bool, problem: str) -> None:
            if not is_valid:
                raise DeviceError(f"step {step}, batch slot {row.batch_slot}: {problem}")

        table_size = self._tables.shape[1]
        end = row.start + row.n_tokens
        table_end = row.table_start + len(row.table_pages)
        require(row.n_tokens >= 1 and row.start >= 0, f"{row.n_tokens} tokens from position {row.start}")
        require(end <= self._max_model_len, f"position {end - 1} is beyond max_model_len {self._max_model_len}")
        n_ids = 1 if row.tokens is None else len(row.tokens) / _TOKEN.itemsize
        require(n_ids == row.n_tokens, f"{n_ids:g} ids for {row.n_tokens} tokens")
        require(
            row.table_start >= 0 and table_end <= table_size,
            f"table entries {row.table_start} to {table_end} of a block table of {table_size}",
        )
        if row.table_pages:
            low, high = min(row.table_pages), max(row.table_pages)
            require(low >= 0 and high < self._n_pages, f"pages {low} to {high} of a pool of {self._n_pages}")
        known = self._tables[row.batch_slot, : -(-end // self._page_size)] >= 0
        known[row.table_start : table_end] = True
        require(bool(known.all()), f"some positions below {end} have no page in the block table")
        if row.sampling is not None:
            self._check_sampling(row.batch_slot, row.sampling, require)

    def _check_sampling(self, batch_slot: int, sampling: RowSampling, require: Callable[[bool, str], None]) -> None:
        require(sampling.temperature >= 0.0, f"temperature {sampling.temperature}")
        require(0.0 < sampling.top_p <= 1.0, f"top_p {sampling.top_p}")
        require(0.0 <= sampling.min_p <= 1.0, f"min_p {sampling.min_p}")
        require(sampling.top_k >= 0, f"top_k {sampling.top_k}")
        require(sampling.repetition_penalty > 0.0, f"repetition_penalty {sampling.repetition_penalty}")
        require((sampling.n_logprobs or 0) >= 0, f"n_logprobs {sampling.n_logprobs}")
        if sampling.history is not None:
            n_history = len(sampling.history.tokens) / _TOKEN.itemsize
            n_prompt = sampling.history.n_prompt
            require(
                n_history.is_integer() and 0 <= n_prompt <= n_history,
                f"a history of {n_history:g} tokens with a prompt of {n_prompt}",
            )
        elif sampling.has_penalties:
            require(bool(self._has_history[batch_slot]), "penalties without a history")


def _tensor(values: list[int] | NDArray[np.integer]) -> Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.int64))
