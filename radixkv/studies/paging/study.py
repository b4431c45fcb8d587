"""The study: all schemes on all workloads, plus paging with several page sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from radixkv.errors import ConfigError
from radixkv.studies.paging.allocators import BestFitAllocator, BuddyAllocator, next_power_of_two
from radixkv.studies.paging.contiguous import (
    ContiguousScheme,
    reserve_exact_length,
    reserve_maximum,
    reserve_power_of_two,
)
from radixkv.studies.paging.lengths import WorkloadLengths
from radixkv.studies.paging.paged import PagedScheme
from radixkv.studies.paging.scheme import Scheme
from radixkv.studies.paging.simulation import NeverFull, SimulationResult, simulate
from radixkv.studies.paging.workloads import StudyWorkload, generate_workload

ResultLine = dict[str, Any]
"""The fields of a JSON line of results."""

PAGED = "paged"
RESERVE_MAXIMUM = "reserve-maximum"
"""The scheme whose largest batch and throughput paging is compared with."""

SCHEMES: Mapping[str, Callable[[int, int], Scheme]] = {
    RESERVE_MAXIMUM: lambda n_slots, longest: ContiguousScheme(BestFitAllocator(n_slots), reserve_maximum(longest)),
    "reserve-power-of-two": lambda n_slots, longest: ContiguousScheme(
        BuddyAllocator(n_slots), reserve_power_of_two(longest)
    ),
    "oracle": lambda n_slots, longest: ContiguousScheme(BuddyAllocator(n_slots), reserve_exact_length),
    "oracle-best-fit": lambda n_slots, longest: ContiguousScheme(BestFitAllocator(n_slots), reserve_exact_length),
}
"""Factories of the reserving schemes; the arguments are the pool's token slots and the maximum sequence length."""


_NOT_PAGED_FIELDS: ResultLine = {"page_size": None, "retractions": 0, "host_us_per_token": None}


@dataclass(frozen=True)
class StudySettings:
    """The settings of a study."""

    lengths: WorkloadLengths
    """Lengths of prompts and answers."""
    workloads: Sequence[str]
    """Names of workloads."""
    page_size: int
    """Tokens per page when schemes are compared."""
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
        minimum = next_power_of_two(self.max_model_len) + max((self.page_size, *self.page_sizes))
        if self.pool_tokens < minimum:
            raise ConfigError(
                f"--max-total-tokens {self.pool_tokens} is less than {minimum}: the pool must hold a sequence of "
                f"--max-model-len {self.max_model_len} under every scheme; give a larger one"
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


def compare_schemes(settings: StudySettings) -> Iterator[ResultLine]:
    """Yields a line for each scheme on each workload, the reserving schemes first."""
    for name in settings.workloads:
        workload = settings.workload(name)
        for scheme, make in SCHEMES.items():
            run = simulate(make(settings.pool_tokens, settings.max_model_len), workload)
            yield {"scheme": scheme, **_result_fields(run, workload, settings), **_NOT_PAGED_FIELDS}
        yield _paged(settings, workload, settings.page_size)


def compare_page_sizes(settings: StudySettings) -> Iterator[ResultLine]:
    """Yields a line for each page size on each workload, except where memory never runs out."""
    for name in settings.workloads:
        workload = settings.workload(name)
        for page_size in settings.page_sizes:
            try:
                yield _paged(settings, workload, page_size)
            except NeverFull:
                continue  # ``page_size_remarks`` reports missing lines


def _paged(settings: StudySettings, workload: StudyWorkload, page_size: int) -> ResultLine:
    scheme = PagedScheme(settings.pool_tokens, page_size)
    run = simulate(scheme, workload)
    scheme.check()
    return {
        "scheme": PAGED,
        **_result_fields(run, workload, settings),
        "page_size": page_size,
        "retractions": scheme.n_preemptions,
        "host_us_per_token": round(1e6 * scheme.seconds / workload.n_answer_tokens, 3),
    }


def _result_fields(run: SimulationResult, workload: StudyWorkload, settings: StudySettings) -> ResultLine:
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
        "pool_tokens": settings.pool_tokens,
        "max_model_len": settings.max_model_len,
        "seed": settings.seed,
    }
