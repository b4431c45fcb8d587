"""The study: all schemes on all workloads, plus paging with several page sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from radixkv.errors import ConfigError
from radixkv.studies.paging.allocators import next_power_of_two
from radixkv.studies.paging.lengths import WorkloadLengths
from radixkv.studies.paging.paged import PagedScheme
from radixkv.studies.paging.scheme import Scheme
from radixkv.studies.paging.schemes import (
    CONTIGUOUS,
    RADIX,
    SHARES_GRANULES,
    Pool,
    granule_scheme,
    granule_tokens,
    paged_scheme,
)
from radixkv.studies.paging.simulation import NeverFull, SimulationResult, simulate
from radixkv.studies.paging.workloads import StudyWorkload, generate_workload

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


def compare_schemes(settings: StudySettings) -> Iterator[ResultLine]:
    """Yields a line for each scheme on each workload, and for each granule size of a scheme that has granules."""
    for name in settings.workloads:
        workload = settings.workload(name)
        for scheme in settings.schemes:
            if scheme in SHARES_GRANULES:
                for granule_bytes in settings.granule_sizes:
                    made = granule_scheme(scheme, settings.pool_tokens, granule_bytes)
                    yield {**_paged_line(scheme, made, settings, workload), "granule_bytes": granule_bytes}
            elif scheme in CONTIGUOUS:
                mean_answer = workload.n_answer_tokens / workload.n_sequences
                contiguous = CONTIGUOUS[scheme](Pool(settings.pool_tokens, settings.max_model_len, mean_answer))
                line = _line(scheme, contiguous, settings, workload)
                yield {**line, "copied_per_token": round(contiguous.n_copied / workload.n_answer_tokens, 3)}
            else:
                made = paged_scheme(scheme, settings.pool_tokens, settings.page_size)
                yield _paged_line(scheme, made, settings, workload)


def compare_page_sizes(settings: StudySettings) -> Iterator[ResultLine]:
    """Yields a line of ``radix`` for each page size on each workload, except where memory never runs out."""
    for name in settings.workloads:
        workload = settings.workload(name)
        for page_size in settings.page_sizes:
            try:
                yield _paged_line(RADIX, paged_scheme(RADIX, settings.pool_tokens, page_size), settings, workload)
            except NeverFull:
                continue  # ``page_size_remarks`` reports missing lines


def _paged_line(name: str, scheme: PagedScheme, settings: StudySettings, workload: StudyWorkload) -> ResultLine:
    line = _line(name, scheme, settings, workload)
    scheme.check()
    return {
        **line,
        "page_size": scheme.cache.page_size,
        "host_us_per_token": round(1e6 * scheme.seconds / workload.n_answer_tokens, 3),
    }


def _line(name: str, scheme: Scheme, settings: StudySettings, workload: StudyWorkload) -> ResultLine:
    run = simulate(scheme, workload)
    return {
        "scheme": name,
        **_result_fields(run, workload, settings),
        "retractions": scheme.n_preemptions,
        "copied_per_token": 0.0,
        "page_size": None,
        "granule_bytes": None,
        "host_us_per_token": None,
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
