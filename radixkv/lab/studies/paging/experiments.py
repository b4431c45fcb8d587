"""An experiment of the study: one scheme on one workload."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from radixkv.lab.studies.paging.paged import PagedScheme
from radixkv.lab.studies.paging.scheme import Scheme
from radixkv.lab.studies.paging.schemes import CONTIGUOUS, SHARES_GRANULES, Pool, granule_scheme, paged_scheme
from radixkv.lab.studies.paging.simulation import NeverFull, SimulationResult, simulate
from radixkv.lab.studies.paging.workloads import StudyWorkload

ResultLine = dict[str, Any]
"""The fields of a JSON line of results."""


@dataclass(frozen=True)
class Experiment:
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


def run_experiment(experiment: Experiment) -> ResultLine:
    """Simulates an experiment; returns its line. Takes seconds. Raises ``NeverFull`` if memory never ran out."""
    if experiment.scheme in CONTIGUOUS:
        return _contiguous_line(experiment)
    if experiment.scheme in SHARES_GRANULES:
        assert experiment.granule_bytes is not None
        scheme = granule_scheme(experiment.scheme, experiment.pool_tokens, experiment.granule_bytes)
    else:
        scheme = paged_scheme(experiment.scheme, experiment.pool_tokens, experiment.page_size)
    return _paged_line(experiment, scheme)


def run_experiment_unless_never_full(experiment: Experiment) -> ResultLine | None:
    """Simulates an experiment; returns its line. Takes seconds. None: memory never ran out."""
    try:
        return run_experiment(experiment)
    except NeverFull:
        return None


def _contiguous_line(experiment: Experiment) -> ResultLine:
    n_answer_tokens = experiment.workload.n_answer_tokens
    mean_answer = n_answer_tokens / experiment.workload.n_sequences
    scheme = CONTIGUOUS[experiment.scheme](Pool(experiment.pool_tokens, experiment.max_model_len, mean_answer))
    return {**_line(experiment, scheme), "copied_per_token": round(scheme.n_copied / n_answer_tokens, 3)}


def _paged_line(experiment: Experiment, scheme: PagedScheme) -> ResultLine:
    line = _line(experiment, scheme)
    scheme.check()
    return {
        **line,
        "page_size": scheme.cache.page_size,
        "host_us_per_token": round(1e6 * scheme.seconds / experiment.workload.n_answer_tokens, 3),
        "granule_bytes": experiment.granule_bytes,
    }


def _line(experiment: Experiment, scheme: Scheme) -> ResultLine:
    run = simulate(scheme, experiment.workload)
    return {
        "scheme": experiment.scheme,
        **_result_fields(run, experiment),
        "retractions": scheme.n_preemptions,
        "copied_per_token": 0.0,
        "page_size": None,
        "granule_bytes": None,
        "host_us_per_token": None,
    }


def _result_fields(run: SimulationResult, experiment: Experiment) -> ResultLine:
    workload = experiment.workload
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
        "pool_tokens": experiment.pool_tokens,
        "max_model_len": experiment.max_model_len,
        "seed": experiment.seed,
    }
