"""The study: all schemes on all workloads, plus paging with several page sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from radixkv.errors import ConfigError
from radixkv.lab.studies.paging.allocators import next_power_of_two
from radixkv.lab.studies.paging.experiments import (
    Experiment,
    ResultLine,
    run_experiment,
    run_experiment_unless_never_full,
)
from radixkv.lab.studies.paging.lengths import WorkloadLengths
from radixkv.lab.studies.paging.processes import Map
from radixkv.lab.studies.paging.schemes import RADIX, SHARES_GRANULES, granule_tokens
from radixkv.lab.studies.paging.workloads import StudyWorkload, generate_workload


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
    granule_sizes: Sequence[int]
    """Bytes of the granules of contiguous virtual memory, which are compared with each other."""
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
            for granule_bytes in self.granule_sizes if name in SHARES_GRANULES else ():
                n_tokens = granule_tokens(granule_bytes)
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
        return Experiment(workload, scheme, self.page_size, self.pool_tokens, self.max_model_len, self.seed)


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
        experiments += [replace(experiment, page_size=page_size) for page_size in settings.page_sizes]
    # ``page_size_remarks`` reports missing lines.
    return (line for line in map_items(run_experiment_unless_never_full, experiments) if line is not None)


def _scheme_experiments(settings: StudySettings, workload_name: str) -> Iterator[Experiment]:
    workload = settings.workload(workload_name)
    for scheme in settings.schemes:
        experiment = settings.experiment(workload, scheme)
        if scheme in SHARES_GRANULES:
            for granule_bytes in settings.granule_sizes:
                yield replace(experiment, granule_bytes=granule_bytes)
        else:
            yield experiment
