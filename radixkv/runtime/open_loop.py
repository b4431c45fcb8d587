"""Opens a loop: the model, the pool, the tiers and the scheduler over them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from radixkv.checkpoints import Checkpoint
from radixkv.errors import UnsupportedFeature
from radixkv.processes.cores import n_cores
from radixkv.runtime.assemble import assemble_loop, open_scheduler, page_quotas
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.cache.window_pages import WindowPages
from radixkv.runtime.device.factory import look_at_machine, resolve_config
from radixkv.runtime.device.ranks.open import open_ranks
from radixkv.runtime.device.resolved_config import ResolvedConfig
from radixkv.runtime.device.start_times import StartTimes
from radixkv.runtime.loop import Loop
from radixkv.runtime.protocols.adapters import Adapters
from radixkv.runtime.protocols.request import RequestBranch
from radixkv.runtime.protocols.states import States
from radixkv.runtime.scheduler.scheduler import SchedulerLimits
from radixkv.runtime.step.executor import Executor
from radixkv.runtime.structured.grammars import Grammars, refusal_of_all
from radixkv.runtime.structured.vocabulary import read_vocabulary
from radixkv.settings.config import EngineConfig
from radixkv.tree.eviction_policies import open_eviction_policy
from radixkv.tree.states import BLOCK_TOKENS
from radixkv.wire.adapter_messages import ServedAdapter

if TYPE_CHECKING:
    from radixkv.runtime.adapters.slots import AdapterSlots
    from radixkv.runtime.pauses.pauses import Pauses

logger = logging.getLogger(__name__)

OpenDevice = Callable[[ResolvedConfig, Checkpoint, StartTimes], Executor]


def build_loop(
    config: EngineConfig,
    checkpoint: Checkpoint,
    tokenizer_folder: Path | None = None,
    *,
    warms_grammars: bool = False,
    times: StartTimes | None = None,
) -> Loop:
    """Resolves the settings and opens a loop. Takes seconds. Raises as ``open_loop`` and ``resolve_config`` do."""
    times = times or StartTimes()
    resolved = resolve_config(config, checkpoint, look_at_machine(config.model.device))
    times.end("settings and machine")
    return open_loop(resolved, checkpoint, tokenizer_folder, warms_grammars=warms_grammars, times=times)


def open_loop(
    resolved: ResolvedConfig,
    checkpoint: Checkpoint,
    tokenizer_folder: Path | None = None,
    *,
    warms_grammars: bool = False,
    times: StartTimes | None = None,
    open_device: OpenDevice = open_ranks,
    make_cache: Callable[..., PageCache] = PageCache,
) -> Loop:
    """Loads the model, allocates the pool and makes a loop over them. Takes seconds, or minutes to compile kernels.

    Args:
        resolved: the settings.
        checkpoint: the model.
        tokenizer_folder: has the tokenizer that structured outputs are written in; None: the checkpoint's folder.
        warms_grammars: whether grammars can be compiled at once when this returns, if this engine has any. If not,
            the first request with structured outputs waits for seconds.
        times: of the stages before; None: there was none.
        open_device: opens the device.
        make_cache: makes the page cache, with the arguments of ``PageCache``.

    Raises:
        CheckpointError: the checkpoint is corrupt or of an unknown kind.
        ConfigError: the settings do not fit the checkpoint or the machine.
        RadixKVError: what compiles grammars could not be started.
    """
    config, times = resolved.config, times or StartTimes()
    is_off = config.model.grammar_backend == "none" or config.model.task != "generate"
    open_grammars = partial(_open_grammars, checkpoint, tokenizer_folder or checkpoint.folder, is_off=is_off)
    with ExitStack() as on_failure:
        warm = None
        if warms_grammars:
            with suppress(UnsupportedFeature):  # each request with structured outputs is told why
                warm = open_grammars()  # beside the model
                on_failure.callback(warm.close)
        shared = None
        if config.cache.cache_url is not None:
            from radixkv.runtime.tiers.open import open_shared_cache

            shared = open_shared_cache(config.cache.cache_url)  # before the model, which takes longer
            on_failure.callback(shared.close)
        executor = open_device(resolved, checkpoint, times)
        on_failure.callback(executor.close)
        pool, n_states, window_pages = executor.window_pool, executor.n_states, None
        if pool is not None:
            n_states = pool.n_slabs + pool.n_window_slabs  # a tail has its last page alone
            window_pages = WindowPages.of(pool, resolved.device_settings.page_size)
        cache = make_cache(
            executor.n_pages,
            resolved.device_settings.page_size,
            is_sharing=config.cache.enable_prefix_caching,
            window=executor.window,
            policy=open_eviction_policy(config.cache.eviction_policy, config.cache.ghost_capacity),
            page_quotas=page_quotas(config.tenants),
            n_states=n_states,
            state_block_tokens=BLOCK_TOKENS if pool is None else resolved.device_settings.page_size,
            window_pages=window_pages,
        )
        host_tier = None
        if (host_bytes := config.cache.host_memory_bytes) is not None:
            from radixkv.runtime.tiers.open import open_tiers

            host_shares = page_quotas(config.tenants)
            host_tier = open_tiers(
                resolved, checkpoint, executor, cache, host_bytes, shared, page_quotas=host_shares
            )
            on_failure.callback(host_tier.close, timeout_s=0.0)
            times.end("tiers")
        settings = resolved.device_settings
        limits = SchedulerLimits(
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_queued_requests=config.scheduler.max_queued_requests,
            queue_timeout_s=config.scheduler.queue_timeout_s,
            target_itl_ms=config.scheduler.target_itl_ms,
            num_reserved_decode_tokens=config.scheduler.num_reserved_decode_tokens,
            max_reserved_decode_share=config.scheduler.max_reserved_decode_share,
            splits_drafts=executor.splits_drafts,
        )
        drafts, more_branches = None, tuple[RequestBranch, ...]()
        states: States | None = None
        speculative = config.scheduler.speculative_config
        if window_pages is not None:
            from radixkv.runtime.states.window_tails import WindowTails

            states = WindowTails(cache, window_pages, _end_token_ids(checkpoint, tokenizer_folder))
        elif executor.n_states is not None:
            from radixkv.runtime.states.recurrent_states import RecurrentStates

            states = RecurrentStates.at_likely_places(cache, _end_token_ids(checkpoint, tokenizer_folder))
        if executor.n_states is None and speculative is not None and config.model.task == "generate":
            from radixkv.runtime.drafts.open import open_drafts

            drafts, more_branches = open_drafts(speculative, cache, executor)
        pauses: Pauses | None = None
        if cache.is_sharing and config.model.task == "generate":
            from radixkv.runtime.pauses.pauses import Pauses

            pauses = Pauses(cache)
        adapters: Adapters | None = None
        adapter_slots: AdapterSlots | None = None
        if executor.adapters is not None:
            from radixkv.runtime.adapters.loading import LoadableAdapters

            if settings.max_loras is not None:
                from radixkv.runtime.adapters.slots import AdapterSlots

                adapter_slots = AdapterSlots(executor.adapters, settings.max_loras)
            served = [
                ServedAdapter(one.name, one.path, one.digest, one.invocation_tokens) for one in settings.adapters
            ]
            adapters = LoadableAdapters(
                executor.adapters,
                served,
                resolved.max_adapters,
                is_default=config.adapters.max_cpu_loras is None,
                slots=adapter_slots,
                marks=cache.tree.marks,
            )
            on_failure.callback(adapters.close)
        scheduler = open_scheduler(
            cache,
            limits,
            schedule_policy=config.scheduler.schedule_policy,
            lpm_window=config.scheduler.lpm_window,
            lpm_max_passes=config.scheduler.lpm_max_passes,
            admission=config.scheduler.admission,
            tenants=config.tenants,
            host_tier=host_tier,
            loads_ahead=config.cache.load_ahead,
            adapter_slots=adapter_slots,
            drafts=drafts,
            states=states,
            returns=pauses,
            finds_shared_runs=executor.uses_shared_runs,
        )
        loop = assemble_loop(
            scheduler,
            executor,
            tenants=config.tenants,
            pauses=pauses,
            more_branches=more_branches,
            open_grammars=open_grammars if warm is None else lambda: warm,
            max_model_len=resolved.device_settings.max_model_len,
            eos_token_ids=checkpoint.eos_token_ids,
            pin_budget=config.cache.pin_budget,
            kv_budget=config.cache.kv_budget,
            seed=config.seed,
            adapters=adapters,
            start_seconds=times.seconds,
        )
        if warm is not None:
            warm.wait_until_ready()
            times.end("grammars")
        on_failure.pop_all()
    logger.info("ready after %s", times)
    return loop


def check_shared_store(url: str | None) -> None:
    """Opens a store that servers share, if there is to be one, and closes it.

    Raises:
        ConfigError: its package is missing, or the store cannot be used.
    """
    if url is not None:
        from radixkv.runtime.tiers.open import open_shared_cache

        open_shared_cache(url).close()


def _end_token_ids(checkpoint: Checkpoint, tokenizer_folder: Path | None) -> frozenset[int]:
    """Returns the tokens that end an answer or a message."""
    from radixkv.text.message_ends import message_end_ids

    return checkpoint.eos_token_ids | message_end_ids(tokenizer_folder or checkpoint.folder)


def _open_grammars(checkpoint: Checkpoint, tokenizer_folder: Path, *, is_off: bool) -> Grammars:
    """Starts what compiles grammars; returns at once. Raises ``UnsupportedFeature`` if this engine has none."""
    if is_off:
        raise UnsupportedFeature(
            "structured_outputs is off: this engine runs with grammar_backend none, or does not generate",
            param="structured_outputs",
        )
    has_tokenizer = (tokenizer_folder / "tokenizer.json").exists()
    eos_token_ids = sorted(token for token in checkpoint.eos_token_ids if token < checkpoint.vocab_size)
    if (refusal := refusal_of_all(has_tokenizer=has_tokenizer, has_eos=bool(eos_token_ids))) is not None:
        raise refusal
    read = partial(read_vocabulary, tokenizer_folder, checkpoint.vocab_size, eos_token_ids)
    return Grammars(read, n_threads=n_cores())
