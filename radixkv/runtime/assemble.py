"""Assembles a loop of trunk and branches. Besides, only ``open_loop`` and ``process`` know branches.

Tenants, tiers and events are imported only if the settings ask for them; the other branches are always there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from time import monotonic
from typing import TYPE_CHECKING

from radixkv.errors import ConfigError, UnsupportedFeature
from radixkv.runtime.alarms import Alarms
from radixkv.runtime.beams.group import open_group
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.cache.page_quotas import PageQuotas
from radixkv.runtime.headroom.expected import ExpectedHeadroom
from radixkv.runtime.headroom.session_answers import SessionAnswer
from radixkv.runtime.intake import Intake
from radixkv.runtime.lifetimes.commands import close_session, end_of_adapter, pin
from radixkv.runtime.lifetimes.pins import Pins
from radixkv.runtime.lifetimes.sessions import Sessions
from radixkv.runtime.loop import Loop
from radixkv.runtime.paged_eviction.branch import PagedEvictions, refusal_of
from radixkv.runtime.protocols.adapters import Adapters
from radixkv.runtime.protocols.drafts import Drafts
from radixkv.runtime.protocols.headroom import Headroom
from radixkv.runtime.protocols.queue import Queue
from radixkv.runtime.protocols.request import RequestBranch
from radixkv.runtime.protocols.returns import Returns
from radixkv.runtime.protocols.shares import Shares
from radixkv.runtime.protocols.states import States
from radixkv.runtime.protocols.tiers import Tiers
from radixkv.runtime.reporting.block_tables import make_tables
from radixkv.runtime.reporting.cache_commands import CacheCommands
from radixkv.runtime.reporting.stats import make_stats
from radixkv.runtime.scheduler.scheduler import Scheduler, SchedulerLimits
from radixkv.runtime.scheduler.shared_prefixes import MIN_SHARED_TOKENS, SharedPrefixes
from radixkv.runtime.scheduler.waiting import WaitingQueue
from radixkv.runtime.step.executor import Executor
from radixkv.runtime.structured.gate import GrammarGate
from radixkv.runtime.structured.grammars import Grammars
from radixkv.settings.config import AdmissionPolicy, CacheConfig, SchedulePolicy, SchedulerConfig
from radixkv.settings.tenants import TenantConfig
from radixkv.wire.cache_messages import BeginPause, CloseSession, EndPause, PauseBegun, PauseEnded, Pin
from radixkv.wire.messages import WIRE_VERSION, Ready

if TYPE_CHECKING:
    from radixkv.runtime.adapters.slots import AdapterSlots
    from radixkv.runtime.events.log import EventLog
    from radixkv.runtime.pauses.pauses import Pauses
    from radixkv.runtime.tiers.host_tier import HostTier


def page_quotas(tenants: Sequence[TenantConfig]) -> PageQuotas | None:
    """Returns what divides the pages of one cache among tenants; None without tenants. O(tenants)."""
    if not tenants:
        return None
    from radixkv.runtime.tenants.tenant_pages import TenantPages

    return TenantPages(tenants)


def open_scheduler(
    cache: PageCache,
    limits: SchedulerLimits,
    *,
    schedule_policy: SchedulePolicy = SchedulerConfig.schedule_policy,
    lpm_window: int = SchedulerConfig.lpm_window,
    lpm_max_passes: int = SchedulerConfig.lpm_max_passes,
    admission: AdmissionPolicy = SchedulerConfig.admission,
    tenants: Sequence[TenantConfig] = (),
    host_tier: HostTier | None = None,
    loads_ahead: bool = False,
    adapter_slots: AdapterSlots | None = None,
    drafts: Drafts | None = None,
    states: States | None = None,
    returns: Returns | None = None,
    finds_shared_runs: bool = False,
    min_shared_tokens: int = MIN_SHARED_TOKENS,
    clock: Callable[[], float] = monotonic,
) -> Scheduler:
    """Makes a scheduler with the branches that the settings ask for. O(tenants).

    Args:
        cache: the page cache over the device's pool; with tenants it has their ``page_quotas``.
        limits: of steps and of the queue.
        schedule_policy, lpm_window, lpm_max_passes: the order of admission, as in ``SchedulerConfig``.
        admission: what it leaves free for running answers, as in ``SchedulerConfig``.
        tenants: who may send requests; none: all requests are of one, and no order but theirs counts.
        host_tier: copies pages to and from the host tier; None without one.
        loads_ahead: whether it does so for waiting requests before their turn.
        adapter_slots: for which requests wait; None: steps can have all adapters.
        drafts: guesses the tokens that follow; None: nothing does.
        states: those of recurrent layers in the tree; None: there are none.
        returns: the conversations that are expected back; None: nobody looks for them.
        finds_shared_runs: whether plans list the pages that decode rows share.
        min_shared_tokens: length of the shortest run of shared pages that plans list.
        clock: seconds, monotonic.
    """
    open_queue = partial(WaitingQueue, cache, policy=schedule_policy, window=lpm_window, max_passes=lpm_max_passes)
    queue: Queue
    shares: Shares
    if tenants:
        from radixkv.runtime.tenants.shares import open_shares

        shares, queue = open_shares(cache, tenants, limits.max_num_seqs, open_queue, lpm_window)
    else:
        shares, queue = Shares(), open_queue()
    if adapter_slots is not None:
        queue = adapter_slots.open_queue(queue, {tenant.name: tenant.weight for tenant in tenants})
    headroom = Headroom()
    if admission == "expected":
        headroom = ExpectedHeadroom(
            cache,
            n_unknown_tokens=limits.num_reserved_decode_tokens,
            max_unknown_share=limits.max_reserved_decode_share,
        )
    tiers = Tiers()
    if host_tier is not None:
        from radixkv.runtime.tiers.memory_tiers import MemoryTiers

        tiers = MemoryTiers(cache, queue, host_tier, clock, loads_ahead=loads_ahead)
    scheduler = Scheduler(
        cache,
        limits,
        queue,
        shares=shares,
        tiers=tiers,
        drafts=drafts or Drafts(),
        states=states or States(),
        returns=returns or Returns(),
        headroom=headroom,
        shared_prefixes=SharedPrefixes(cache, min_tokens=min_shared_tokens) if finds_shared_runs else None,
        clock=clock,
    )
    if adapter_slots is not None:
        running = scheduler.running
        adapter_slots.watch(lambda: chain(running, running.releasing, tiers.requests()))
    return scheduler


def assemble_loop(
    scheduler: Scheduler,
    executor: Executor,
    *,
    tenants: Sequence[TenantConfig] = (),
    pauses: Pauses | None = None,
    more_branches: Sequence[RequestBranch] = (),
    open_grammars: Callable[[], Grammars] | None = None,
    max_model_len: int,
    eos_token_ids: frozenset[int] = frozenset(),
    pin_budget: float = CacheConfig.pin_budget,
    kv_budget: int | None = None,
    seed: int = 0,
    adapters: Adapters | None = None,
    start_seconds: Mapping[str, float] | None = None,
    clock: Callable[[], float] = monotonic,
) -> Loop:
    """Makes a loop with all branches. O(1).

    Args:
        scheduler: plans the steps, over a cache with as many pages as the executor's pool.
        executor: the device.
        tenants: the scheduler's; none: all clients are one.
        pauses: the scheduler's ``returns``; None: nobody looks for them.
        more_branches: what requests may choose by their messages, beside the branches that are always there.
        open_grammars: opens what compiles structured outputs, when it is needed first; raises
            ``UnsupportedFeature`` if there is none.
        max_model_len: maximum of prompt and output together, in tokens.
        eos_token_ids: tokens that end an output, unless its request has ``ignore_eos``.
        pin_budget: fraction of each tier's pages that the pins of a namespace cover at most.
        kv_budget: of requests that have none of their own; None: they keep all KV.
        seed: seed of the generators that draw seeds for requests without one.
        adapters: those that the executor has; None: it has none.
        start_seconds: time of each stage of the start, for ``Stats``.
        clock: seconds, monotonic.

    Raises:
        ConfigError: a tenant could not have the pages of the longest request, or there is a ``kv_budget`` and pages
            of this model cannot be dropped.
    """
    cache, limits, tiers = scheduler.cache, scheduler.limits, scheduler.tiers
    adapters = adapters or Adapters()
    ready = Ready(
        version=WIRE_VERSION,
        vocab_size=executor.vocab_size,
        max_model_len=max_model_len,
        page_size=cache.page_size,
        n_pages=cache.n_pages,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        device=executor.device,
        dtype=executor.dtype,
        n_host_slots=tiers.n_host_slots,
        has_disk=tiers.has_disk,
        kv_cache_dtype=executor.kv_dtype if executor.kv_dtype != executor.dtype else None,
        holds_whole_requests=not holds_any_length(cache, limits.max_num_batched_tokens),
        has_drafts=scheduler.drafts.stats() is not None,
        tensor_parallel_size=executor.n_ranks,
        state_block_tokens=0 if cache.tree.states is None else cache.tree.states.block_tokens,
        adapters=adapters.served,
    )
    if tenants:
        from radixkv.runtime.tenants.tenant_pages import check_longest_request

        n_longest = cache.pages_for(ready.max_prompt_and_answer - 1)  # the last token needs no KV
        if not ready.holds_whole_requests:
            n_longest = cache.windows.max_pages(limits.max_num_batched_tokens) or n_longest
        check_longest_request(tenants, cache.n_pages, n_longest, cache.page_size)
    refusal = refusal_of(executor)
    if kv_budget is not None and refusal is not None:
        raise ConfigError(f"{refusal}; leave kv_eviction and kv_budget out")
    evictions = PagedEvictions(cache, kv_budget, refusal)
    alarms = Alarms()
    intake = Intake(
        ready,
        tenants=tenants,
        eos_token_ids=eos_token_ids,
        seed=seed,
        adapters=adapters,
        marks=cache.tree.marks,
        clock=clock,
    )
    gate = GrammarGate(open_grammars or _refuse_grammars, limits.max_queued_requests)
    caches = [cache] if tiers.host is None else [cache, tiers.host]
    sessions = Sessions(caches)
    pins = Pins(caches, alarms, offer=tiers.offer, budget=pin_budget, clock=clock)
    leave = scheduler.returns.close_session
    adapters.on_freed = partial(end_of_adapter, pins, sessions, leave=leave)
    commands = CacheCommands(
        intake,
        scheduler,
        gate,
        adapters,
        find_pin=pins.find,
        others={
            Pin: partial(pin, intake, pins),
            CloseSession: partial(close_session, intake, sessions, leave=leave),
            BeginPause: _begin_no_pause if pauses is None else pauses.begin,
            EndPause: _end_no_pause if pauses is None else pauses.end,
        },
        before_flush=(pins.clear, *(() if pauses is None else (pauses.clear,))),
    )
    return Loop(
        ready,
        scheduler,
        executor,
        intake=intake,
        adapters=adapters,
        gate=gate,
        is_gated=lambda message: message.sampling.structured_outputs is not None,
        branches=(
            RequestBranch(
                lambda message: message.sampling.use_beam_search,
                partial(
                    open_group,
                    running=scheduler.running,
                    waiting=scheduler.waiting,
                    vocab_size=executor.vocab_size,
                ),
            ),
            evictions.branch,
            RequestBranch(lambda message: bool(message.pins), pins.follow),
            RequestBranch(lambda message: bool(message.session_id), sessions.follow),
            *(() if pauses is None else (RequestBranch(pauses.is_followed, pauses.follow),)),
            RequestBranch(lambda message: bool(message.session_id), SessionAnswer.follow),
            *more_branches,
        ),
        run_command=commands.run,
        make_stats=partial(
            make_stats, scheduler, pins.count_pages, evictions.stats, gate, adapters, start_seconds or {}
        ),
        make_tables=partial(make_tables, scheduler),
        alarms=alarms,
        clock=clock,
    )


def holds_any_length(cache: PageCache, max_row_tokens: int) -> bool:
    """Returns whether a pool holds requests of any length: they free what is behind their windows.

    Args:
        cache: the page cache of the pool.
        max_row_tokens: maximum tokens of a row.
    """
    n_pages = cache.windows.max_pages(max_row_tokens)
    return not cache.is_sharing and n_pages is not None and n_pages <= cache.n_pages


def open_event_log(loop: Loop, *, shows_salted_tokens: bool) -> EventLog:
    """Returns a log of what the tiers get and lose from now on. Call it before the first turn, once.

    Args:
        loop: of the tiers.
        shows_salted_tokens: whether events of prompts with a ``cache_salt`` have their tokens.
    """
    from radixkv.runtime.events.log import EventLog

    scheduler = loop.scheduler
    return EventLog(
        scheduler.cache,
        scheduler.tiers.changes(),
        shows_salted_tokens=shows_salted_tokens,
        adapter_names=loop.adapters.names,
    )


def _begin_no_pause(message: BeginPause) -> PauseBegun:
    return PauseBegun(message.id)


def _end_no_pause(message: EndPause) -> PauseEnded:
    return PauseEnded(message.id)


def _refuse_grammars() -> Grammars:
    raise UnsupportedFeature("structured_outputs needs grammars; this loop has none", param="structured_outputs")
