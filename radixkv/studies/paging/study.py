"""The study: every scheme on every workload, and the engine's at every page size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from radixkv.errors import ConfigError
from radixkv.studies.paging.allocators import BestFit, Buddy, next_power_of_two
from radixkv.studies.paging.contiguous import Contiguous, to_length, to_maximum, to_power_of_two
from radixkv.studies.paging.lengths import AllLengths
from radixkv.studies.paging.paged import Paged
from radixkv.studies.paging.scheme import Scheme
from radixkv.studies.paging.simulation import NeverFull, Run, simulate
from radixkv.studies.paging.workloads import Workload, make_workload

Figures = dict[str, Any]
"""A JSON line."""

PAGED = "paged"
LARGEST = "reserve-maximum"
"""What largest batches are compared with."""

SCHEMES: Mapping[str, Callable[[int, int], Scheme]] = {
    LARGEST: lambda n_slots, longest: Contiguous(BestFit(n_slots), to_maximum(longest)),
    "reserve-power-of-two": lambda n_slots, longest: Contiguous(Buddy(n_slots), to_power_of_two(longest)),
    "oracle": lambda n_slots, longest: Contiguous(Buddy(n_slots), to_length),
    "oracle-best-fit": lambda n_slots, longest: Contiguous(BestFit(n_slots), to_length),
}
"""Those that reserve, by the pool's token slots and the longest sequence."""


_NOT_PAGED: Figures = {"page_size": None, "retractions": 0, "host_us_per_token": None}


@dataclass(frozen=True)
class Settings:
    """What is studied."""

    lengths: AllLengths
    workloads: Sequence[str]
    page_size: int
    page_sizes: Sequence[int]
    """For the curve."""
    pool_tokens: int
    max_model_len: int
    n_conversations: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for page_size in (self.page_size, *self.page_sizes):
            if not 1 <= page_size <= self.max_model_len:
                raise ConfigError(
                    f"page size {page_size} is not between 1 and --max-model-len {self.max_model_len}; give another"
                )
        least = next_power_of_two(self.max_model_len) + max((self.page_size, *self.page_sizes))
        if self.pool_tokens < least:
            raise ConfigError(
                f"--max-total-tokens {self.pool_tokens} is less than {least}: the pool must hold a sequence of "
                f"--max-model-len {self.max_model_len} under every scheme; give a larger one"
            )
        if self.n_conversations is not None and self.n_conversations < 1:
            raise ConfigError(f"--num-prompts {self.n_conversations} must be at least 1")

    def workload(self, name: str) -> Workload:
        """One of the five."""
        return make_workload(
            name,
            self.lengths,
            pool_tokens=self.pool_tokens,
            max_model_len=self.max_model_len,
            n_conversations=self.n_conversations,
            seed=self.seed,
        )


def compare_schemes(settings: Settings) -> Iterator[Figures]:
    """A line for each scheme on each workload, those that reserve first."""
    for name in settings.workloads:
        workload = settings.workload(name)
        for scheme, make in SCHEMES.items():
            run = simulate(make(settings.pool_tokens, settings.max_model_len), workload)
            yield {"scheme": scheme, **_figures(run, workload, settings), **_NOT_PAGED}
        yield _paged(settings, workload, settings.page_size)


def compare_page_sizes(settings: Settings) -> Iterator[Figures]:
    """A line for each page size on each workload; none where memory never runs out."""
    for name in settings.workloads:
        workload = settings.workload(name)
        for page_size in settings.page_sizes:
            try:
                yield _paged(settings, workload, page_size)
            except NeverFull:
                continue  # which line is not there is for the reader of the lines to say


def _paged(settings: Settings, workload: Workload, page_size: int) -> Figures:
    scheme = Paged(settings.pool_tokens, page_size)
    run = simulate(scheme, workload)
    scheme.check()
    return {
        "scheme": PAGED,
        **_figures(run, workload, settings),
        "page_size": page_size,
        "retractions": scheme.n_retractions,
        "host_us_per_token": round(1e6 * scheme.seconds / workload.n_answer_tokens, 3),
    }


def _figures(run: Run, workload: Workload, settings: Settings) -> Figures:
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
