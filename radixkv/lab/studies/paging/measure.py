"""Measurements of the engine: throughput by batch size, up to where the memory of each scheme ends.

The memory layout is paged in all of them. Reservation only limits how many sequences run at once, to as many as the
scheme has memory for in a simulation of the same requests. Time that contiguous memory would save in attention does
not count.
"""

from __future__ import annotations

import gc
import time
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from radixkv.checkpoints import Checkpoint, resolve
from radixkv.errors import ConfigError, request_error
from radixkv.lab.studies.paging.schemes import (
    ORACLE,
    PAGED,
    RADIX,
    RESERVE_MAXIMUM,
    RESERVE_POWER_OF_TWO,
    SCHEMES,
)
from radixkv.lab.studies.paging.sequences import (
    SimulatedConversation,
    SimulatedSequence,
    TokenRange,
    TokenRangeSource,
    Turn,
)
from radixkv.lab.studies.paging.simulation import NeverFull, simulate
from radixkv.lab.studies.paging.study import ResultLine
from radixkv.lab.studies.paging.timed import TimedAttention, TimedPageCache
from radixkv.lab.studies.paging.workloads import StudyWorkload
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.device.cpu.executor import CpuExecutor
from radixkv.runtime.device.factory import look_at_machine, resolve_config
from radixkv.runtime.device.ranks.open import open_ranks
from radixkv.runtime.device.resolved_config import ResolvedConfig
from radixkv.runtime.device.start_times import StartTimes
from radixkv.runtime.loop import Loop
from radixkv.runtime.open_loop import open_loop
from radixkv.runtime.step.executor import Executor
from radixkv.settings.config import EngineConfig
from radixkv.terminal import shown_download
from radixkv.tree.node import TOKEN_BYTES
from radixkv.wire.cache_messages import Flush
from radixkv.wire.messages import Done, Failed, FromRuntime, GetStats, Submit, Tokens
from radixkv.wire.sampling import SamplingParams
from radixkv.wire.stats import Stats

MEASURABLE = (RESERVE_MAXIMUM, RESERVE_POWER_OF_TWO, ORACLE, PAGED, RADIX)
"""The schemes that the engine can run."""
STATIC = "static"
"""The baseline: a batch starts when all answers of the one before have ended. Each request reserves the maximum."""
MIN_LENGTH = 16
"""Fewest tokens of a request: a quarter is shared, and an answer has at least an eighth."""
BATCHES_PER_RUN = 3
"""Requests of a run, as a multiple of the batch size."""
TOKEN_IDS = range(10, 1000)
"""Token ids of the random prompts, which every vocabulary has."""
_MAX_WAIT_S = 0.1
"""How long to wait at a time for pages from the host tier."""


@dataclass(frozen=True)
class MeasureSettings:
    """What is measured.

    Raises:
        ConfigError: the engine cannot measure this.
    """

    schemes: Sequence[str]
    """Names of schemes."""
    lengths: Sequence[int]
    """Tokens of a prompt and its answer together."""
    batch_sizes: Sequence[int]
    """Sequences that run at once, ascending."""
    max_model_len: int
    """Maximum tokens of a sequence, which ``reserve-maximum`` reserves."""
    seed: int = 0
    """Seed of the requests."""

    def __post_init__(self) -> None:
        if unknown := [name for name in self.schemes if name not in MEASURABLE]:
            raise ConfigError(
                f"the engine cannot run {', '.join(unknown)}; with --measure, --schemes are some of "
                f"{', '.join(MEASURABLE)}"
            )
        for length in self.lengths:
            if not MIN_LENGTH <= length <= self.max_model_len:
                raise ConfigError(
                    f"--measure-lengths {length} is not between {MIN_LENGTH} and --max-model-len "
                    f"{self.max_model_len}; give another"
                )
        if min(self.batch_sizes) < 1:
            raise ConfigError(f"--batch-sizes {min(self.batch_sizes)} must be at least 1")


def check_engine(config: EngineConfig, settings: MeasureSettings) -> None:
    """Checks what can be known before the model's weights are there.

    Raises:
        CheckpointError: the model does not exist.
        ConfigError: the engine cannot be measured with these settings, or not on this machine.
    """
    configs, machine = _engine_configs(config, settings), look_at_machine(config.model.device)
    with shown_download(config.model.model, None) as show:
        checkpoint = resolve(config.model.model, config.model.revision, load_format="dummy", show_download=show)
    for each in configs.values():
        resolve_config(each, checkpoint, machine)


def _engine_configs(config: EngineConfig, settings: MeasureSettings) -> Mapping[bool, EngineConfig]:
    """Returns the engine's configurations without and with prefix caching. Raises ``ConfigError``."""
    n_rows = settings.batch_sizes[-1]
    if config.scheduler.max_num_seqs is not None and config.scheduler.max_num_seqs < n_rows:
        raise ConfigError(
            f"--max-num-seqs {config.scheduler.max_num_seqs} is less than the largest of --batch-sizes, {n_rows}; "
            "leave it out"
        )
    config = replace(
        config,
        model=replace(config.model, max_model_len=settings.max_model_len),
        scheduler=replace(config.scheduler, max_num_seqs=n_rows, schedule_policy="fcfs"),
    )
    return {
        shares: replace(config, cache=replace(config.cache, enable_prefix_caching=shares))
        for shares in (False, True)
    }


def measure(config: EngineConfig, settings: MeasureSettings) -> Iterator[ResultLine]:
    """Yields a line for each scheme, length and batch size at which the scheme's memory suffices.

    The last batch size of a scheme is that at which its memory ends, if that is less than the largest asked for.
    Schemes without sharing differ only in that size, so one run of a batch size serves all of them.

    Args:
        config: configuration of the engine.
        settings: what is measured.

    Raises:
        ConfigError: the engine cannot start, or its pool is smaller than a sequence of the maximum length.
        CheckpointError: the model does not exist.
    """
    configs = _engine_configs(config, settings)
    unshared = [name for name in settings.schemes if name != RADIX]
    for shares, names in (
        (False, [STATIC, *unshared]),
        (True, [name for name in settings.schemes if name == RADIX]),
    ):
        if not names:
            continue
        with _opened(configs[shares]) as engine:
            loop = engine.loop
            pool_tokens = loop.ready.n_pages * loop.ready.page_size
            if pool_tokens < settings.max_model_len:
                raise ConfigError(
                    f"the pool holds {pool_tokens} tokens, less than --max-model-len {settings.max_model_len}; "
                    "give a larger --max-total-tokens"
                )
            common = {
                "model": Path(config.model.model).name,
                "device": loop.ready.devices,
                "dtype": loop.ready.dtype,
                "load_format": config.model.load_format,
                "page_size": loop.ready.page_size,
                "pool_tokens": pool_tokens,
                "max_model_len": settings.max_model_len,
                "max_num_batched_tokens": loop.ready.max_num_batched_tokens,
                "seed": settings.seed,
            }
            for length in settings.lengths:
                workload = requests_of_length(length, BATCHES_PER_RUN * settings.batch_sizes[-1], settings.seed)
                for line in _measure_length(engine, workload, names, settings):
                    yield {**line, "length": length, **common}


def requests_of_length(length: int, n_requests: int, seed: int) -> StudyWorkload:
    """Returns requests of one length that all wait from the start.

    The first quarter of a prompt is the same in all of them. Answers have an eighth to three eighths of the length,
    uniform; the rest is the request's own part of the prompt.
    """
    rng, token_ranges = Random(seed), TokenRangeSource()
    prefix = token_ranges.new(length // 4)
    conversations: list[SimulatedConversation] = []
    for _ in range(n_requests):
        answer = token_ranges.new(rng.randint(length // 8, 3 * length // 8))
        own = token_ranges.new(length - prefix.n_tokens - answer.n_tokens)
        conversations.append((Turn((SimulatedSequence((prefix, own), answer),)),))
    return StudyWorkload(f"length {length}", "fixed", conversations, [0] * n_requests, 0)


def largest_batch(name: str, workload: StudyWorkload, pool_tokens: int, page_size: int, max_model_len: int) -> int:
    """Returns how many of the requests a scheme has memory for, on average while others wait; all if none waits."""
    pool = workload.pool(pool_tokens, max_model_len, page_size)
    try:
        return int(simulate(SCHEMES[RESERVE_MAXIMUM if name == STATIC else name](pool), workload).mean_batch)
    except NeverFull:
        return workload.n_sequences


def _measure_length(
    engine: _Engine, workload: StudyWorkload, names: Sequence[str], settings: MeasureSettings
) -> Iterator[ResultLine]:
    """Yields the schemes' lines in the order of batch sizes, the baseline's lines first."""
    ready = engine.loop.ready
    sequences = [conversation[0].sequences[0] for conversation in workload.conversations]
    pool_tokens = ready.n_pages * ready.page_size
    limits = {
        name: largest_batch(name, workload, pool_tokens, ready.page_size, settings.max_model_len) for name in names
    }
    largest = settings.batch_sizes[-1]
    ends = {name: min(limit, largest) for name, limit in limits.items()}
    sizes = {name: {end, *(size for size in settings.batch_sizes if size <= end)} for name, end in ends.items()}
    for is_static in (True, False):
        chosen = [name for name in names if (name == STATIC) == is_static]
        for n_rows in sorted({size for name in chosen for size in sizes[name]}):
            run = _serve(engine, sequences[: BATCHES_PER_RUN * n_rows], n_rows, is_static=is_static)
            for name in chosen:
                if n_rows in sizes[name]:
                    memory_ends = limits[name] if limits[name] < largest else None
                    yield {"scheme": name, "batch_size": n_rows, "memory_ends_at": memory_ends, **run}


@contextmanager
def _opened(config: EngineConfig) -> Iterator[_Engine]:
    """Opens the engine and warms it up."""
    model = config.model
    with shown_download(model.model, None) as show:
        checkpoint = resolve(model.model, model.revision, load_format=model.load_format, show_download=show)
    engine = _Engine(config, checkpoint)
    try:
        warm_up = requests_of_length(min(300, engine.loop.ready.max_model_len), 8, 0)
        first = [conversation[0].sequences[0] for conversation in warm_up.conversations]
        _serve(engine, first, 8, is_static=False)
        yield engine
    finally:
        engine.loop.close()
        gc.collect()


def _serve(engine: _Engine, sequences: Sequence[SimulatedSequence], n_rows: int, *, is_static: bool) -> ResultLine:
    """Serves requests, ``n_rows`` at a time; measures throughput as long as there are so many.

    With ``is_static``, the next requests start when all before them have ended, and the whole time counts.
    """
    waiting = deque(_submits(sequences))
    loop = engine.loop
    loop.receive(Flush("flush"))
    before = engine.snapshot()
    n_running = n_tokens = n_counted = 0
    counted_s = None
    started = time.perf_counter()
    while waiting or n_running:
        messages: list[FromRuntime] = []
        if not is_static or not n_running:
            while waiting and n_running < n_rows:
                messages += loop.receive(waiting.popleft())
                n_running += 1
            if counted_s is None and n_running < n_rows:
                n_counted, counted_s = n_tokens, time.perf_counter() - started
        if loop.is_waiting:
            loop.wait(_MAX_WAIT_S)
        for message in [*messages, *loop.turn()]:
            if isinstance(message, Tokens):
                n_tokens += sum(len(item.tokens) // TOKEN_BYTES for item in message.items)
            elif isinstance(message, Failed):
                raise request_error(message.code, message.text, param=message.param)
            elif isinstance(message, Done):
                n_running -= 1
    duration = time.perf_counter() - started
    if counted_s is None:
        n_counted, counted_s = n_tokens, duration
    return {
        "requests": len(sequences),
        "duration": round(duration, 4),
        "output_throughput": round(n_counted / counted_s, 1),
        **_growth(before, engine.snapshot()),
    }


def _submits(sequences: Sequence[SimulatedSequence]) -> Iterator[Submit]:
    known: dict[TokenRange, bytes] = {}
    for number, sequence in enumerate(sequences):
        for token_range in sequence.prompt:
            if token_range not in known:
                tokens = Random(token_range.first).choices(TOKEN_IDS, k=token_range.n_tokens)
                known[token_range] = array("i", tokens).tobytes()
        sampling = SamplingParams(temperature=0.0, max_tokens=sequence.answer.n_tokens, ignore_eos=True)
        yield Submit(str(number), b"".join(known[token_range] for token_range in sequence.prompt), sampling)


class _Snapshot(NamedTuple):
    stats: Stats
    cache_seconds: float
    attention_seconds: float | None


class _Engine:
    """A loop whose page cache is timed, and on the CPU its attention. Raises as ``open_loop`` does."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint) -> None:
        self._cache: TimedPageCache | None = None
        self._attention: TimedAttention | None = None
        """None on CUDA, where graphs run attention."""
        resolved = resolve_config(config, checkpoint, look_at_machine(config.model.device))
        self.loop: Loop = open_loop(
            resolved, checkpoint, open_device=self._open_device, make_cache=self._make_cache
        )

    def snapshot(self) -> _Snapshot:
        (stats,) = self.loop.receive(GetStats("stats"))
        assert isinstance(stats, Stats)
        assert self._cache is not None
        return _Snapshot(stats, self._cache.seconds, None if self._attention is None else self._attention.seconds)

    def _open_device(self, resolved: ResolvedConfig, checkpoint: Checkpoint, times: StartTimes) -> Executor:
        executor = open_ranks(resolved, checkpoint, times)
        if isinstance(executor, CpuExecutor):
            executor.attention = self._attention = TimedAttention(executor.attention)
        return executor

    def _make_cache(self, *args: Any, **kwargs: Any) -> PageCache:
        self._cache = TimedPageCache(*args, **kwargs)
        return self._cache


def _growth(before: _Snapshot, after: _Snapshot) -> ResultLine:
    """Returns the differences between two snapshots of the engine."""
    old, new = before.stats, after.stats
    management = new.schedule_seconds - old.schedule_seconds
    cache = after.cache_seconds - before.cache_seconds
    line: dict[str, Any] = {
        "prompt_tokens": new.prompt_tokens_total - old.prompt_tokens_total,
        "cached_tokens": new.prefix_hits_total - old.prefix_hits_total,
        "output_tokens": new.generation_tokens_total - old.generation_tokens_total,
        "steps": new.steps_total - old.steps_total,
        "retractions": new.preemptions_total - old.preemptions_total,
        "attention_seconds": None,
        "management_seconds": round(management, 6),
        "cache_seconds": round(cache, 6),
        "management_pct_of_attention": None,
        "cache_pct_of_attention": None,
    }
    if before.attention_seconds is not None and after.attention_seconds is not None:
        attention = after.attention_seconds - before.attention_seconds
        line["attention_seconds"] = round(attention, 6)
        line["management_pct_of_attention"] = round(100 * management / attention, 3)
        line["cache_pct_of_attention"] = round(100 * cache / attention, 3)
    return line
