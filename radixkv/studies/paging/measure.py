"""The engine itself at saturation, with pages and with contiguous reservation.

The layout in memory stays paged in both. Reservation only limits how many rows may run, to what the pool holds if
each has the memory of the longest sequence to itself, and switches sharing off. What contiguous memory would save
in attention is not counted.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from random import Random

from radixkv.config import EngineConfig
from radixkv.errors import ConfigError
from radixkv.llm import LLM
from radixkv.runtime.device.factory import check_device
from radixkv.sampling import SamplingParams
from radixkv.studies.paging.lengths import AllLengths
from radixkv.studies.paging.sequences import Segment
from radixkv.studies.paging.study import LARGEST, PAGED, Figures
from radixkv.studies.paging.workloads import Workload, make_workload
from radixkv.wire import Stats

MEASURABLE = ("uniform-short", "variable-length", "shared-prefix")
"""Workloads whose prompts do not depend on answers, with one answer to each."""
TOKEN_IDS = range(10, 1000)
"""What prompts are made of; every vocabulary has them."""
N_WARM_UP = 8


def check_gpu(config: EngineConfig, workloads: Sequence[str]) -> None:
    """Raises ``ConfigError`` if this cannot be measured here: called before anything runs."""
    if config.model.device == "cpu":
        raise ConfigError("--measure runs the engine on a GPU; leave out --device cpu, or --measure")
    try:
        check_device("cuda")
    except ConfigError as error:
        fault = str(error).partition(";")[0]
        raise ConfigError(f"--measure runs the engine on a GPU, but {fault}; leave out --measure") from None
    if not set(workloads) & set(MEASURABLE):
        raise ConfigError(
            f"--measure has no form of {', '.join(workloads)}; choose --workloads among {', '.join(MEASURABLE)}"
        )


def measure(
    config: EngineConfig,
    lengths: AllLengths,
    workloads: Sequence[str],
    *,
    max_model_len: int,
    n_conversations: int | None = None,
    seed: int = 0,
) -> Iterator[Figures]:
    """Serves the workloads' requests, all sent at once, with pages and then with reservation; a line for each.

    Seconds count from the first request to the last answer, so also while few are left to run.

    Args:
        config: of the engine with pages.
        lengths: of prompts and answers.
        workloads: those of ``MEASURABLE`` are measured.
        max_model_len: longest prompt and answer together, and what is reserved.
        n_conversations: how many requests; None takes as many as fill the pool a few times.
        seed: of the requests.

    Raises:
        ConfigError: the engine cannot be opened, or its pool holds no sequence of ``max_model_len``.
        CheckpointError: there is no such model.
    """
    config = replace(config, model=replace(config.model, max_model_len=max_model_len))
    llm = _open(config)
    stats = llm.get_metrics()
    pool_tokens = stats.n_pages * config.cache.page_size
    n_rows = pool_tokens // max_model_len
    if not n_rows:
        llm.shutdown()
        raise ConfigError(f"the pool holds {pool_tokens} tokens, less than --max-model-len {max_model_len}")
    made = [
        make_workload(
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
    most_rows = config.scheduler.max_num_seqs
    for workload in made:
        yield {"scheme": PAGED, "max_num_seqs": most_rows, **_run(llm, workload), **common}
    llm.shutdown()
    gc.collect()
    llm = _open(_reserving(config, pool_tokens, n_rows))
    for workload in made:
        yield {"scheme": LARGEST, "max_num_seqs": n_rows, **_run(llm, workload), **common}
    llm.shutdown()
    gc.collect()


def _reserving(config: EngineConfig, pool_tokens: int, n_rows: int) -> EngineConfig:
    cache = replace(
        config.cache, kv_cache_memory_bytes=None, max_total_tokens=pool_tokens, enable_prefix_caching=False
    )
    return replace(config, cache=cache, scheduler=replace(config.scheduler, max_num_seqs=n_rows))


def _open(config: EngineConfig) -> LLM:
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
    llm.generate([rng.choices(TOKEN_IDS, k=n_tokens) for _ in range(N_WARM_UP)], _answer_of(16), use_tqdm=False)
    return llm


def _run(llm: LLM, workload: Workload) -> Figures:
    sequences = [turn.sequences[0] for conversation in workload.conversations for turn in conversation]
    texts: dict[Segment, list[int]] = {}
    prompts = [[token for part in sequence.prompt for token in _text(part, texts)] for sequence in sequences]
    answers = [_answer_of(sequence.answer.n_tokens) for sequence in sequences]
    llm.flush_cache()
    before = llm.get_metrics()
    begun = time.perf_counter()
    llm.generate(prompts, answers, use_tqdm=False)
    duration = time.perf_counter() - begun
    return {
        "workload": workload.name,
        "lengths": workload.lengths,
        "tokenizer": workload.tokenizer,
        "sequences": len(sequences),
        "left_out": workload.n_left_out,
        "duration": round(duration, 4),
        **_counted(before, llm.get_metrics(), duration),
    }


def _text(segment: Segment, known: dict[Segment, list[int]]) -> list[int]:
    """Ids that a model has; of one segment always the same."""
    if segment not in known:
        known[segment] = Random(segment.first).choices(TOKEN_IDS, k=segment.n_tokens)
    return known[segment]


def _answer_of(n_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=n_tokens, ignore_eos=True)


def _counted(before: Stats, after: Stats, duration: float) -> Figures:
    """What the engine counted in between."""
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
