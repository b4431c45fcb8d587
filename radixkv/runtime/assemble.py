"""Assembles a loop over a cache, a scheduler and a device: the only module that knows trunk and branches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic

from radixkv.errors import UnsupportedFeature
from radixkv.runtime.alarms import Alarms
from radixkv.runtime.cache.timed import TimedPageCache
from radixkv.runtime.intake import Intake
from radixkv.runtime.lifetimes.pins import Pins
from radixkv.runtime.lifetimes.sessions import Sessions
from radixkv.runtime.loop import Loop
from radixkv.runtime.reporting.cache_commands import CacheCommands
from radixkv.runtime.reporting.stats import make_stats
from radixkv.runtime.scheduler.scheduler import Scheduler
from radixkv.runtime.seams import RequestBranch
from radixkv.runtime.step.executor import Executor
from radixkv.runtime.step.forecast import StepForecast
from radixkv.runtime.structured.gate import GrammarGate
from radixkv.runtime.structured.grammars import Grammars
from radixkv.runtime.tenants.page_shares import check_longest_request
from radixkv.runtime.tiers.transfers import Transfers
from radixkv.settings.config import CacheConfig
from radixkv.settings.tenants import TenantConfig
from radixkv.wire.messages import WIRE_VERSION, Ready, Submit


def _refuse_grammars() -> Grammars:
    raise UnsupportedFeature("structured_outputs needs grammars; this loop has none", param="structured_outputs")


def _is_turn(message: Submit) -> bool:
    """Whether a request is a turn of a session: what it finds in the cache says what others may need."""
    return bool(message.session_id) and message.reads_cache and message.sampling.prompt_logprobs is None


def assemble_loop(
    cache: TimedPageCache,
    scheduler: Scheduler,
    executor: Executor,
    *,
    tenants: Sequence[TenantConfig] = (),
    transfers: Transfers | None = None,
    open_grammars: Callable[[], Grammars] = _refuse_grammars,
    max_model_len: int,
    eos_token_ids: frozenset[int] = frozenset(),
    pin_budget: float = CacheConfig.pin_budget,
    seed: int = 0,
    start_seconds: Mapping[str, float] | None = None,
    forecast: StepForecast | None = None,
    clock: Callable[[], float] = monotonic,
) -> Loop:
    """Makes a loop with all branches. O(1).

    Args:
        cache: the scheduler's cache, with as many pages as the executor's pool.
        scheduler: plans the steps.
        executor: the device.
        tenants: the scheduler's; none: all clients are one.
        transfers: the scheduler's, which copy pages to and from the host tier; None without one.
        open_grammars: opens what compiles structured outputs, when it is needed first; raises
            ``UnsupportedFeature`` if there is none.
        max_model_len: maximum of prompt and output together, in tokens.
        eos_token_ids: tokens that end an output, unless its request has ``ignore_eos``.
        pin_budget: fraction of each tier's pages that the pins of a namespace cover at most.
        seed: seed of the generators that draw seeds for requests without one.
        start_seconds: of each stage of the start, for ``Stats``.
        forecast: the scheduler's, which learns from the steps.
        clock: seconds, monotonic.

    Raises:
        ConfigError: a tenant could not have the pages of the longest request.
    """
    ready = Ready(
        version=WIRE_VERSION,
        vocab_size=executor.vocab_size,
        max_model_len=max_model_len,
        page_size=cache.page_size,
        n_pages=cache.n_pages,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        device=executor.device,
        dtype=executor.dtype,
        n_host_slots=None if transfers is None else transfers.copier.n_slots,
        has_disk=transfers is not None and transfers.disk is not None,
        kv_cache_dtype=executor.kv_dtype if executor.kv_dtype != executor.dtype else None,
        holds_whole_requests=not cache.holds_any_length(scheduler.max_num_batched_tokens),
    )
    n_longest = cache.pages_for(ready.max_prompt_and_answer - 1)  # the last token needs no KV
    if not ready.holds_whole_requests:
        n_longest = cache.max_private_pages(scheduler.max_num_batched_tokens) or n_longest
    check_longest_request(tenants, cache.n_pages, n_longest, cache.page_size)
    alarms = Alarms()
    intake = Intake(ready, tenants=tenants, eos_token_ids=eos_token_ids, seed=seed, clock=clock)
    gate = GrammarGate(open_grammars, scheduler.max_queued_requests)
    sessions = Sessions(cache, None if transfers is None else transfers.host)
    pins = Pins(cache, transfers, alarms, budget=pin_budget, clock=clock)
    commands = CacheCommands(cache, intake, scheduler, transfers, pins, sessions, gate)
    return Loop(
        ready,
        cache,
        scheduler,
        executor,
        intake=intake,
        gate=gate,
        is_gated=lambda message: message.sampling.structured_outputs is not None,
        branches=(
            RequestBranch(lambda message: bool(message.pins), pins.follow),
            RequestBranch(_is_turn, sessions.follow),
        ),
        run_command=commands.run,
        count=partial(make_stats, scheduler, cache, transfers, pins, gate, start_seconds or {}),
        alarms=alarms,
        transfers=transfers,
        forecast=forecast,
        clock=clock,
    )
