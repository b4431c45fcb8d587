"""A cell of the study: one scheme on one workload."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from radixkv.studies.paging.paged import PagedScheme
from radixkv.studies.paging.scheme import Scheme
from radixkv.studies.paging.schemes import CONTIGUOUS, SHARES_GRANULES, Pool, granule_scheme, paged_scheme
from radixkv.studies.paging.simulation import NeverFull, SimulationResult, simulate
from radixkv.studies.paging.workloads import StudyWorkload

ResultLine = dict[str, Any]
"""The fields of a JSON line of results."""


@dataclass(frozen=True)
class Cell:
    """What one simulation needs. It can be pickled."""

    workload: StudyWorkload
    """The requests."""
    scheme: str
    """Name of the scheme."""
    page_size: int
    """Tokens per page, for a scheme with pages."""
    pool_tokens: int
    """Token slots of the pool."""
    max_model_len: int
    """Maximum tokens of a prompt and answer together."""
    seed: int
    """Seed of the workload."""
    granule_bytes: int | None = None
    """Bytes of a granule, for a scheme with granules."""


def run_cell(cell: Cell) -> ResultLine:
    """Simulates a cell; returns its line. Takes seconds. Raises ``NeverFull`` if memory never ran out."""
    if cell.scheme in CONTIGUOUS:
        return _contiguous_line(cell)
    if cell.scheme in SHARES_GRANULES:
        assert cell.granule_bytes is not None
        scheme = granule_scheme(cell.scheme, cell.pool_tokens, cell.granule_bytes)
    else:
        scheme = paged_scheme(cell.scheme, cell.pool_tokens, cell.page_size)
    return _paged_line(cell, scheme)


def run_cell_unless_never_full(cell: Cell) -> ResultLine | None:
    """Simulates a cell; returns its line. Takes seconds. None: memory never ran out."""
    try:
        return run_cell(cell)
    except NeverFull:
        return None


def _contiguous_line(cell: Cell) -> ResultLine:
    n_answer_tokens = cell.workload.n_answer_tokens
    mean_answer = n_answer_tokens / cell.workload.n_sequences
    scheme = CONTIGUOUS[cell.scheme](Pool(cell.pool_tokens, cell.max_model_len, mean_answer))
    return {**_line(cell, scheme), "copied_per_token": round(scheme.n_copied / n_answer_tokens, 3)}


def _paged_line(cell: Cell, scheme: PagedScheme) -> ResultLine:
    line = _line(cell, scheme)
    scheme.check()
    return {
        **line,
        "page_size": scheme.cache.page_size,
        "host_us_per_token": round(1e6 * scheme.seconds / cell.workload.n_answer_tokens, 3),
        "granule_bytes": cell.granule_bytes,
    }


def _line(cell: Cell, scheme: Scheme) -> ResultLine:
    run = simulate(scheme, cell.workload)
    return {
        "scheme": cell.scheme,
        **_result_fields(run, cell),
        "retractions": scheme.n_preemptions,
        "copied_per_token": 0.0,
        "page_size": None,
        "granule_bytes": None,
        "host_us_per_token": None,
    }


def _result_fields(run: SimulationResult, cell: Cell) -> ResultLine:
    workload = cell.workload
    return {
        "workload": workload.name,
        **{name: round(value, 3) for name, value in run.shares._asdict().items()},
        "fragmentation_pct": round(run.shares.fragmentation_pct, 3),
        "lost_pct": round(run.shares.lost_pct, 3),
        "largest_batch": run.largest_batch,
        "mean_batch": round(run.mean_batch, 2),
        "steps": run.n_steps,
        "saturated_steps": run.n_saturated_steps,
        "sequences": workload.n_sequences,
        "left_out": workload.n_left_out,
        "lengths": workload.lengths,
        "tokenizer": workload.tokenizer,
        "pool_tokens": cell.pool_tokens,
        "max_model_len": cell.max_model_len,
        "seed": cell.seed,
    }
