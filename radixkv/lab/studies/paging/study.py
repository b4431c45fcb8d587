"""The study: all schemes on all workloads, plus paging with several page sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from radixkv.errors import ConfigError
from radixkv.lab.studies.paging.allocators import next_power_of_two
from radixkv.lab.studies.paging.lengths import WorkloadLengths
from radixkv.lab.studies.paging.paged import PagedScheme
from radixkv.lab.studies.paging.processes import Map
from radixkv.lab.studies.paging.schemes import RADIX, SCHEMES, WITH_GRANULES, Granule, Pool
from radixkv.lab.studies.paging.simulation import NeverFull, simulate
from radixkv.lab.studies.paging.workloads import StudyWorkload, generate_workload

ResultLine = dict[str, Any]
"""The fields of a JSON line of results."""


@dataclass(frozen=True)
class StudySettings:
    """The settings of a study."""

    lengths: WorkloadLengths
    """Lengths of prompts and answers."""
    workloads: Sequence[str]
    """Names of workloads."""
    schemes: Sequence[str]
    """Names of schemes."""
    page_size: int
    """Tokens per page when schemes are compared."""
    granules: Sequence[Granule]
    """The granules of contiguous virtual memory, which are compared with each other."""
    page_sizes: Sequence[int]
    """Page sizes that are compared with each other."""
    pool_tokens: int
    """Token slots of the pool."""
    max_model_len: int
    """Maximum tokens of a prompt and answer together."""
    n_conversations: int | None = None
    """Requests or chats per workload; None takes enough to fill the pool a few times."""
    seed: int = 0
    """Seed of the workloads."""

    def __post_init__(self) -> None:
        for page_size in (self.page_size, *self.page_sizes):
            if not 1 <= page_size <= self.max_model_len:
                raise ConfigError(
                    f"page size {page_size} is not between 1 and --max-model-len {self.max_model_len}; give another"
                )
        n_largest = max((self.page_size, *self.page_sizes))
        if self.pool_tokens < (minimum := next_power_of_two(self.max_model_len) + n_largest):
            raise ConfigError(
                f"--max-total-tokens {self.pool_tokens} is less than {minimum}: the pool must hold a sequence of "
                f"--max-model-len {self.max_model_len} under every scheme; give a larger one"
            )
        for name in self.schemes:
            for granule in self.granules if name in WITH_GRANULES else ():
                n_tokens = granule.n_tokens
                if self.pool_tokens < (minimum := -(-self.max_model_len // n_tokens) * n_tokens):
                    raise ConfigError(
                        f"--max-total-tokens {self.pool_tokens} is less than {minimum}: {name} needs granules of "
                        f"{n_tokens} tokens for a sequence of --max-model-len {self.max_model_len}; give more, or "
                        "smaller --granule-sizes"
                    )
        if self.n_conversations is not None and self.n_conversations < 1:
            raise ConfigError(f"--num-prompts {self.n_conversations} must be at least 1")

    def workload(self, name: str) -> StudyWorkload:
        """Generates a workload by name."""
        return generate_workload(
            name,
            self.lengths,
            pool_tokens=self.pool_tokens,
            max_model_len=self.max_model_len,
            n_conversations=self.n_conversations,
            seed=self.seed,
        )

    def experiment(self, workload: StudyWorkload, scheme: str) -> Experiment:
        """Returns the experiment of a scheme on a workload, with pages of ``page_size`` and without granules."""
        pool = workload.pool(self.pool_tokens, self.max_model_len, self.page_size)
        return Experiment(workload, scheme, pool, self.seed)


@dataclass(frozen=True)
class Experiment:
    """One scheme on one workload. It can be pickled."""

    workload: StudyWorkload
    """The requests."""
    scheme: str
    """Name of the scheme."""
    pool: Pool
    """The memory."""
    seed: int
    """Seed of the workload."""

    def with_pool(self, **changes: Any) -> Experiment:
        """Returns the experiment with another size of pages or granules."""
        return replace(self, pool=self.pool._replace(**changes))


def run_experiment(experiment: Experiment) -> ResultLine:
    """Simulates an experiment; returns its line. Takes seconds. Raises ``NeverFull`` if memory never ran out."""
    workload, pool = experiment.workload, experiment.pool
    scheme = SCHEMES[experiment.scheme](pool)
    run = simulate(scheme, workload)
    page_size = host_us = None
    if isinstance(scheme, PagedScheme):
        scheme.check()
        page_size = scheme.cache.page_size
        host_us = round(1e6 * scheme.seconds / workload.n_answer_tokens, 3)
    return {
        "scheme": experiment.scheme,
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
        "pool_tokens": pool.n_slots,
        "max_model_len": pool.max_model_len,
        "seed": experiment.seed,
        "retractions": scheme.n_preemptions,
        "copied_per_token": round(scheme.n_copied / workload.n_answer_tokens, 3),
        "page_size": page_size,
        "granule_bytes": None if pool.granule is None else pool.granule.n_bytes,
        "layers_in_a_tensor": None if pool.granule is None else pool.granule.n_layers,
        "host_us_per_token": host_us,
    }


def run_experiment_unless_never_full(experiment: Experiment) -> ResultLine | None:
    """Simulates an experiment; returns its line. Takes seconds. None: memory never ran out."""
    try:
        return run_experiment(experiment)
    except NeverFull:
        return None


def compare_schemes(settings: StudySettings, map_items: Map = map) -> Iterator[ResultLine]:
    """Returns a line for each scheme on each workload, and for each granule size of a scheme that has granules.

    Args:
        settings: what to simulate.
        map_items: how to run the simulations; some of ``worker_processes`` begin before a line is taken.

    Raises:
        ConfigError: no lengths fit the settings.
        NeverFull: instead of a line, if memory never ran out.
    """
    return map_items(
        run_experiment,
        [experiment for name in settings.workloads for experiment in _scheme_experiments(settings, name)],
    )


def compare_page_sizes(settings: StudySettings, map_items: Map = map) -> Iterator[ResultLine]:
    """Returns a line of ``radix`` for each page size on each workload, except where memory never runs out.

    Args:
        settings: what to simulate.
        map_items: as in ``compare_schemes``.

    Raises:
        ConfigError: no lengths fit the settings.
    """
    experiments: list[Experiment] = []
    for name in settings.workloads if settings.page_sizes else ():
        experiment = settings.experiment(settings.workload(name), RADIX)
        experiments += [experiment.with_pool(page_size=page_size) for page_size in settings.page_sizes]
    # ``page_size_remarks`` reports missing lines.
    return (line for line in map_items(run_experiment_unless_never_full, experiments) if line is not None)


def _scheme_experiments(settings: StudySettings, workload_name: str) -> Iterator[Experiment]:
    workload = settings.workload(workload_name)
    for scheme in settings.schemes:
        experiment = settings.experiment(workload, scheme)
        if scheme in WITH_GRANULES:
            for granule in settings.granules:
                yield experiment.with_pool(granule=granule)
        else:
            yield experiment
