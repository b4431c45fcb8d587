"""Measurements of the engine at saturation, with pages and with contiguous reservation.

The memory layout is paged in both. Reservation is emulated: the number of rows is limited to the maximum-length
sequences that fit the pool, and sharing is disabled. Time that contiguous memory would save in attention is not
counted.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Literal

from radixkv.config import Device, EngineConfig
from radixkv.errors import ConfigError
from radixkv.llm import LLM
from radixkv.runtime.device.factory import look_at_machine
from radixkv.sampling import SamplingParams
from radixkv.stats import Stats
from radixkv.studies.paging.lengths import WorkloadLengths
from radixkv.studies.paging.schemes import PAGED, RESERVE_MAXIMUM
from radixkv.studies.paging.sequences import TokenRange
from radixkv.studies.paging.study import ResultLine
from radixkv.studies.paging.workloads import StudyWorkload, generate_workload

MEASURABLE = ("uniform-short", "variable-length", "shared-prefix")
"""Workloads with one answer per prompt whose prompts do not depend on answers."""
TOKEN_IDS = range(10, 1000)
"""Token ids of the random prompts, which every vocabulary has."""
N_WARM_UP = 8
"""Requests before the measurement."""


def check_gpu(device: Device | Literal["auto"], workloads: Sequence[str]) -> None:
    """Raises ``ConfigError`` if there is no GPU or no measurable workload; to be called before anything runs."""
    if device == "cpu":
        raise ConfigError("--measure runs the engine on a GPU; leave out --device cpu, or --measure")
    try:
        look_at_machine("cuda")
    except ConfigError as error:
        reason = str(error).partition(";")[0]
        raise ConfigError(f"--measure runs the engine on a GPU, but {reason}; leave out --measure") from None
    if not set(workloads) & set(MEASURABLE):
        raise ConfigError(
            f"--measure does not support {', '.join(workloads)}; add one of {', '.join(MEASURABLE)} to --workloads"
        )


def measure(
    config: EngineConfig,
    lengths: WorkloadLengths,
    workloads: Sequence[str],
    *,
    max_model_len: int,
    n_conversations: int | None = None,
    seed: int = 0,
) -> Iterator[ResultLine]:
    """Serves each workload's requests, all sent at once, with pages and then with reservation; yields a line each.

    Durations run from the first request to the last answer, including the end when few rows are left.

    Args:
        config: configuration of the engine with pages.
        lengths: distributions of prompt and answer lengths.
        workloads: names of workloads; those not in ``MEASURABLE`` are skipped.
        max_model_len: maximum tokens of a prompt and answer together, which is also the reservation.
        n_conversations: number of requests; None takes enough to fill the pool a few times.
        seed: seed of the requests.

    Raises:
        ConfigError: the engine cannot start, or its pool is smaller than ``max_model_len``.
        CheckpointError: the model does not exist.
    """
    config = replace(config, model=replace(config.model, max_model_len=max_model_len))
    llm = _open_engine(config)
    stats = llm.get_metrics()
    pool_tokens = stats.n_pages * config.cache.page_size
    n_rows = pool_tokens // max_model_len
    if not n_rows:
        llm.shutdown()
        raise ConfigError(f"the pool holds {pool_tokens} tokens, less than --max-model-len {max_model_len}")
    generated_workloads = [
        generate_workload(
            name,
            lengths,
            pool_tokens=pool_tokens,
            max_model_len=max_model_len,
            n_conversations=n_conversations,
            seed=seed,
        )
        for name in workloads
        if name in MEASURABLE
    ]
    model = Path(config.model.model).name
    common = {
        "model": model,
        "dtype": config.model.dtype,
        "load_format": config.model.load_format,
        "page_size": config.cache.page_size,
        "pool_tokens": pool_tokens,
        "max_model_len": max_model_len,
        "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
        "seed": seed,
    }
    max_num_seqs = config.scheduler.max_num_seqs
    for workload in generated_workloads:
        yield {"scheme": PAGED, "max_num_seqs": max_num_seqs, **_measure_workload(llm, workload), **common}
    llm.shutdown()
    gc.collect()
    llm = _open_engine(_reserving(config, pool_tokens, n_rows))
    for workload in generated_workloads:
        yield {"scheme": RESERVE_MAXIMUM, "max_num_seqs": n_rows, **_measure_workload(llm, workload), **common}
    llm.shutdown()
    gc.collect()


def _reserving(config: EngineConfig, pool_tokens: int, n_rows: int) -> EngineConfig:
    cache = replace(
        config.cache, kv_cache_memory_bytes=None, max_total_tokens=pool_tokens, enable_prefix_caching=False
    )
    return replace(config, cache=cache, scheduler=replace(config.scheduler, max_num_seqs=n_rows))


def _open_engine(config: EngineConfig) -> LLM:
    scheduler = config.scheduler
    llm = LLM(
        **asdict(config.model),
        **asdict(config.cache),
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        schedule_policy=scheduler.schedule_policy,
    )
    rng = Random(0)
    n_tokens = min(300, llm.max_model_len // 2)
    llm.generate([rng.choices(TOKEN_IDS, k=n_tokens) for _ in range(N_WARM_UP)], _answer_params(16), use_tqdm=False)
    return llm


def _measure_workload(llm: LLM, workload: StudyWorkload) -> ResultLine:
    sequences = [turn.sequences[0] for conversation in workload.conversations for turn in conversation]
    known: dict[TokenRange, list[int]] = {}
    prompts = [
        [token for token_range in sequence.prompt for token in _token_ids(token_range, known)]
        for sequence in sequences
    ]
    sampling_params = [_answer_params(sequence.answer.n_tokens) for sequence in sequences]
    llm.flush_cache()
    before = llm.get_metrics()
    started = time.perf_counter()
    llm.generate(prompts, sampling_params, use_tqdm=False)
    duration = time.perf_counter() - started
    return {
        "workload": workload.name,
        "lengths": workload.lengths,
        "tokenizer": workload.tokenizer,
        "sequences": len(sequences),
        "left_out": workload.n_left_out,
        "duration": round(duration, 4),
        **_engine_statistics(before, llm.get_metrics(), duration),
    }


def _token_ids(token_range: TokenRange, known: dict[TokenRange, list[int]]) -> list[int]:
    """Returns random token ids of the vocabulary, always the same for one range."""
    if token_range not in known:
        known[token_range] = Random(token_range.first).choices(TOKEN_IDS, k=token_range.n_tokens)
    return known[token_range]


def _answer_params(n_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=n_tokens, ignore_eos=True)


def _engine_statistics(before: Stats, after: Stats, duration: float) -> ResultLine:
    """Returns the differences between two snapshots of the engine's statistics."""
    output = after.generation_tokens_total - before.generation_tokens_total
    prompt = after.prompt_tokens_total - before.prompt_tokens_total
    attention = after.attention_seconds - before.attention_seconds
    management = after.schedule_seconds - before.schedule_seconds
    cache = after.cache_seconds - before.cache_seconds
    return {
        "prompt_tokens": prompt,
        "output_tokens": output,
        "output_throughput": round(output / duration, 1),
        "total_throughput": round((prompt + output) / duration, 1),
        "steps": after.steps_total - before.steps_total,
        "retractions": after.preemptions_total - before.preemptions_total,
        "attention_seconds": round(attention, 6),
        "management_seconds": round(management, 6),
        "cache_seconds": round(cache, 6),
        "management_pct_of_attention": round(100 * management / attention, 3),
        "cache_pct_of_attention": round(100 * cache / attention, 3),
    }
