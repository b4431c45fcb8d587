"""The engine loop: receive -> schedule -> launch -> complete -> send; the only user of both scheduler and device.

One turn launches step n+1 and then takes the result of step n, so that the host works while the device computes.
The runtime process drives it with messages from a socket, ``LLM`` with messages from Python calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from time import monotonic, perf_counter
from typing import NamedTuple

from radixkv.checkpoints import Checkpoint
from radixkv.config import CacheConfig, EngineConfig
from radixkv.errors import DeviceError, Draining, InvariantError, RequestError
from radixkv.runtime.cache.pins import Pins
from radixkv.runtime.cache.timed import TimedPageCache
from radixkv.runtime.cache.transfers import Transfers
from radixkv.runtime.cache_commands import CacheCommands
from radixkv.runtime.device.factory import look_at_machine, open_executor, resolve_config
from radixkv.runtime.device.resolved_config import ResolvedConfig
from radixkv.runtime.intake import Intake
from radixkv.runtime.request import Phase, Request, Update
from radixkv.runtime.scheduler.scheduler import Scheduler
from radixkv.runtime.stats import StepCounters, make_stats
from radixkv.runtime.step.executor import Executor
from radixkv.runtime.step.plan import StepPlan
from radixkv.runtime.step.result import PendingStep
from radixkv.runtime.tiers import open_tiers
from radixkv.tree.eviction import open_eviction_policy
from radixkv.tree.node import TOKEN_BYTES
from radixkv.wire import (
    WIRE_VERSION,
    Cancel,
    CloseSession,
    Done,
    Drain,
    Explain,
    Failed,
    Flush,
    FromRuntime,
    GetStats,
    Invalidate,
    NewTokens,
    Pin,
    PromptLogprobs,
    PromptPin,
    Ready,
    Submit,
    Tokens,
)

LOOKAHEAD = 1
"""Steps that stay launched when a turn ends: the device computes them while the host prepares the next one."""


_MAX_CLOSE_S = 5.0
"""How long ``Loop.close`` may write pages to disk."""


class _LaunchedStep(NamedTuple):
    plan: StepPlan
    pending: PendingStep
    launched_at: float
    """Time of ``perf_counter``."""


@dataclass(slots=True)
class _LiveRequest:
    """A request without a terminal message yet."""

    choices: list[Request]
    n_unfinished: int
    """Choices whose end has not been reported yet."""
    pins: tuple[PromptPin, ...]
    """Prefixes of the prompt to pin at the end."""
    is_counted: bool = False
    """Whether the counters include its prompt."""

    @property
    def n_cached(self) -> int:
        return sum(choice.n_cached or 0 for choice in self.choices)

    @property
    def n_copied(self) -> int:
        return sum(choice.n_copied for choice in self.choices)

    @property
    def n_loaded(self) -> int:
        return sum(choice.n_loaded for choice in self.choices)

    @property
    def n_fetched(self) -> int:
        return sum(choice.n_fetched for choice in self.choices)

    @property
    def n_outputs(self) -> int:
        return sum(choice.n_outputs for choice in self.choices)


class Loop:
    """Turns messages of the frontend into steps on the device, and their results into messages.

    Args:
        cache: the scheduler's cache, with as many pages as the executor's pool.
        scheduler: plans the steps.
        executor: the device.
        transfers: the scheduler's, which copy pages to and from the host tier; None without one.
        max_model_len: maximum of prompt and output together, in tokens.
        eos_token_ids: tokens that end an output, unless its request has ``ignore_eos``.
        pin_budget: fraction of each tier's pages that the pins of a namespace cover at most.
        seed: seed of the generator that draws seeds for requests without one.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        cache: TimedPageCache,
        scheduler: Scheduler,
        executor: Executor,
        *,
        transfers: Transfers | None = None,
        max_model_len: int,
        eos_token_ids: frozenset[int] = frozenset(),
        pin_budget: float = CacheConfig.pin_budget,
        seed: int = 0,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.is_draining = False
        """Whether new requests are refused."""
        self._cache = cache
        self._scheduler = scheduler
        self._executor = executor
        self._transfers = transfers
        self._clock = clock
        self.ready = Ready(
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
        )
        """The message that tells a frontend the sizes of model, pool and steps."""
        self._intake = Intake(self.ready, eos_token_ids=eos_token_ids, seed=seed, clock=clock)
        self._pins = Pins(cache, transfers, budget=pin_budget, clock=clock)
        self._cache_commands = CacheCommands(cache, self._intake, scheduler, transfers, self._pins)
        self._live: dict[str, _LiveRequest] = {}
        self._launched: deque[_LaunchedStep] = deque()
        self._last_result_at = 0.0
        self.is_waiting_for_copies = False
        """Whether the last turn had nothing to plan, launch or collect before pages are copied from the host tier.

        Wait for a message, or until one of ``copy_descriptors`` is readable, then call ``turn``."""
        self._counters = StepCounters()

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting, running or releasing."""
        return not self._scheduler.is_idle

    @property
    def copy_descriptors(self) -> list[int]:
        """Descriptors of which one is readable when pages have been copied between tiers; none without tiers.

        Call ``turn`` then, or ``advance_copies`` if there is no work."""
        return [] if self._transfers is None else self._transfers.descriptors()

    def advance_copies(self) -> None:
        """Takes finished copies of pages and starts those that were offered. For a loop without work. O(pages)."""
        self._pins.expire()
        if self._transfers is not None:
            self._scheduler.loading.advance()

    def wait_for_copies(self, timeout_s: float) -> None:
        """Waits until pages have been copied, at most ``timeout_s``."""
        if self._transfers is not None:
            self._transfers.wait(timeout_s)

    def receive(
        self, message: Submit | Cancel | Flush | Invalidate | CloseSession | Explain | Pin | GetStats | Drain
    ) -> list[FromRuntime]:
        """Takes a message; returns its immediate answers. O(tokens) for ``Submit``, ``Explain`` and ``Pin``."""
        match message:
            case Submit():
                return self._submit(message)
            case Cancel():
                return self._cancel(message)
            case Flush() | Invalidate() | CloseSession() | Explain() | Pin():
                return [self._cache_commands.run(message)]
            case GetStats():
                return [
                    make_stats(
                        message.id, self._scheduler, self._cache, self._counters, self._transfers, self._pins
                    )
                ]
            case Drain():
                self.is_draining = True
                return []

    def turn(self) -> list[FromRuntime]:
        """Fails timed-out requests, launches the next step, then takes the oldest step's result.

        The result is taken only if more than ``LOOKAHEAD`` steps are launched, or if nothing could be planned.

        Raises:
            InvariantError: a bug in radixkv.
        """
        started = perf_counter()
        self._pins.expire()
        messages = self._to_messages(self._scheduler.expire())
        plan = self._scheduler.schedule()
        self._counters.schedule_seconds += perf_counter() - started
        if plan is not None:
            self._counters.steps += 1
            try:
                self._launched.append(_LaunchedStep(plan, self._executor.launch(plan), perf_counter()))
            except DeviceError:
                while self._launched:
                    messages += self._collect_result()
                messages += self._to_messages(self._scheduler.fail())
        self.is_waiting_for_copies = False
        if len(self._launched) > LOOKAHEAD or (plan is None and self._launched):
            messages += self._collect_result()
        elif plan is None and self.has_work:
            if not self._scheduler.is_copying:
                raise InvariantError(
                    f"{len(self._scheduler.running)} requests are running, {len(self._scheduler.loading)} loading "
                    f"and {len(self._scheduler.waiting)} waiting, but none of them fits into a step"
                )
            self.is_waiting_for_copies = True
        if not self.has_work:
            self.advance_copies()
        self._counters.step_seconds += perf_counter() - started
        return messages

    def close(self) -> None:
        """Frees the device's memory, even with steps in flight. Call once; the loop is unusable afterwards."""
        self._launched.clear()
        if self._transfers is not None:
            self._transfers.close(_MAX_CLOSE_S)
        self._executor.close()

    def check(self) -> None:
        """Checks every invariant of pages and tree. O(pages). Raises ``InvariantError``."""
        self._scheduler.check()

    def _submit(self, message: Submit) -> list[FromRuntime]:
        if message.id in self._live:
            return []  # The id is taken: the frontend expects one terminal message, that of the live request.
        try:
            if self.is_draining:
                raise Draining("the server is shutting down; send the request elsewhere")
            if message.pins:
                self._pins.check_available("prompt_cache_options")
            choices = self._intake.make_choices(message)
            if message.session_id and choices[0].reads_cache:
                turn = self._scheduler.sessions.begin(choices[0].namespace, message.session_id)
                for choice in choices:
                    choice.turn = turn
            self._scheduler.add(choices[0], choices[1:])
        except RequestError as error:
            return [Failed(message.id, error.code, str(error), error.param)]
        self._live[message.id] = _LiveRequest(choices, len(choices), message.pins)
        return []

    def _cancel(self, message: Cancel) -> list[FromRuntime]:
        live = self._live.get(message.id)
        if live is None:
            return []
        if message.choice is None:
            return [self._finish(live, "abort")]
        if not 0 <= message.choice < len(live.choices):
            return []
        choice = live.choices[message.choice]
        if choice.phase is Phase.FINISHED:
            return []
        self._scheduler.abort(choice)
        live.n_unfinished -= 1
        item = NewTokens(message.id, b"", message.choice, "abort")
        return [Tokens([item]), *([] if live.n_unfinished else [self._finish(live, "abort")])]

    def _collect_result(self) -> list[FromRuntime]:
        """Takes the oldest launched step's result. If it failed, so have all steps launched after it."""
        plan, pending, launched_at = self._launched.popleft()
        try:
            result = pending.result()
        except DeviceError:
            self._discard_launched()
            return self._to_messages(self._scheduler.fail())
        if self._transfers is not None:
            self._measure_step(self._transfers, plan, launched_at)
        self._counters.attention_seconds += result.attention_seconds
        started = perf_counter()
        updates = self._scheduler.complete(plan, result)
        self._cache.check_counts()
        self._counters.schedule_seconds += perf_counter() - started
        return self._to_messages(updates)

    def _measure_step(self, transfers: Transfers, plan: StepPlan, launched_at: float) -> None:
        """Tells the estimate of a load's gain how long a step took, from its launch or the result before it."""
        now = perf_counter()
        seconds = now - max(launched_at, self._last_result_at)
        self._last_result_at = now
        n_prompt_tokens = sum(row.n_tokens for row in plan.rows if row.n_tokens > 1)
        transfers.cost.add_step(n_prompt_tokens, plan.n_tokens, seconds)

    def _discard_launched(self) -> None:
        """Waits for all launched steps and discards their results."""
        while self._launched:
            pending = self._launched.popleft().pending
            try:
                pending.result()
            except DeviceError:
                continue

    def _to_messages(self, updates: list[Update]) -> list[FromRuntime]:
        items: list[NewTokens] = []
        prompt_logprobs: list[PromptLogprobs] = []
        terminal: list[FromRuntime] = []
        for update in updates:
            request = update.request
            live = self._live.get(request.id)
            if live is None:
                continue  # Another choice of it has failed, and so the whole request.
            if update.prompt_logprobs is not None:
                prompt_logprobs.append(update.prompt_logprobs)
            if update.error is not None:
                self._abort_rest(live)
                terminal.append(Failed(request.id, update.error.code, str(update.error), update.error.param))
            elif update.token is not None:
                items.append(_new_tokens(update, update.token))
                if not live.is_counted:
                    self._count_prompt(live, request)
            if update.finish_reason is not None:
                live.n_unfinished -= 1
                if not live.n_unfinished:
                    terminal.append(self._finish(live, update.finish_reason))
        self._counters.generation_tokens += len(items)
        return [Tokens(items, prompt_logprobs), *terminal] if items or prompt_logprobs else terminal

    def _count_prompt(self, live: _LiveRequest, request: Request) -> None:
        live.is_counted = True
        self._counters.prompt_tokens += request.n_prompt
        self._counters.prefix_hits += live.n_cached
        self._counters.prefix_hits_copied += live.n_copied
        self._counters.prefix_hits_loaded += live.n_loaded
        self._counters.prefix_hits_fetched += live.n_fetched

    def _abort_rest(self, live: _LiveRequest) -> None:
        """Aborts the unfinished choices of a request and forgets it.

        The last choice goes first: an aborted leader would hand its prompt over to the next choice.
        """
        del self._live[live.choices[0].id]
        for choice in reversed(live.choices):
            if choice.phase is not Phase.FINISHED:
                self._scheduler.abort(choice)

    def _finish(self, live: _LiveRequest, finish_reason: str) -> Done:
        self._abort_rest(live)
        now, first = self._clock(), live.choices[0]
        if live.is_counted:  # else its prompt is not computed
            self._pin_prompt(live)
        scheduled_at = min((c.scheduled_at for c in live.choices if c.scheduled_at is not None), default=now)
        return Done(
            id=first.id,
            finish_reason=finish_reason,
            n_prompt_tokens=first.n_prompt,
            n_output_tokens=live.n_outputs,
            n_cached_tokens=live.n_cached,
            n_loaded_tokens=live.n_loaded,
            n_fetched_tokens=live.n_fetched,
            queue_time_s=scheduled_at - first.received_at,
            n_copied_tokens=live.n_copied,
        )

    def _pin_prompt(self, live: _LiveRequest) -> None:
        first = live.choices[0]
        uses_tiers = any(choice.uses_tiers for choice in live.choices)
        for pin in live.pins:
            tokens = bytes(first.tokens[: pin.n_tokens * TOKEN_BYTES])
            self._pins.pin(first.namespace, tokens, pin.ttl_s, uses_tiers=uses_tiers)


def _new_tokens(update: Update, token: int) -> NewTokens:
    return NewTokens(
        id=update.request.id,
        tokens=token.to_bytes(TOKEN_BYTES, "little"),
        choice=update.request.choice,
        finish_reason=update.finish_reason,
        stop_token_id=token if update.finish_reason == "stop" else None,
        logprobs=None if update.logprobs is None else [update.logprobs],
    )


def build_loop(config: EngineConfig, checkpoint: Checkpoint) -> Loop:
    """Resolves the settings and opens a loop. Takes seconds. Raises as ``open_loop`` and ``resolve_config`` do."""
    return open_loop(resolve_config(config, checkpoint, look_at_machine(config.model.device)), checkpoint)


def open_loop(resolved: ResolvedConfig, checkpoint: Checkpoint) -> Loop:
    """Loads the model, allocates the pool and makes a loop over them. Takes seconds.

    Raises:
        CheckpointError: the checkpoint is corrupt or of an unknown kind.
        ConfigError: the settings do not fit the checkpoint or the machine.
    """
    with ExitStack() as on_failure:
        executor = open_executor(resolved, checkpoint)
        on_failure.callback(executor.close)
        cache = TimedPageCache(
            executor.n_pages,
            resolved.page_size,
            shares=resolved.enable_prefix_caching,
            policy=open_eviction_policy(resolved.eviction_policy, resolved.ghost_capacity),
        )
        transfers = None
        if resolved.host_memory_bytes is not None:
            transfers = open_tiers(resolved, checkpoint, executor, cache, resolved.host_memory_bytes)
            on_failure.callback(transfers.close, timeout_s=0.0)
        scheduler = Scheduler(
            cache,
            max_num_seqs=resolved.max_num_seqs,
            max_num_batched_tokens=resolved.max_num_batched_tokens,
            schedule_policy=resolved.schedule_policy,
            lpm_window=resolved.lpm_window,
            lpm_max_passes=resolved.lpm_max_passes,
            max_queued_requests=resolved.max_queued_requests,
            queue_timeout_s=resolved.queue_timeout_s,
            transfers=transfers,
            finds_shared_runs=executor.uses_shared_runs,
        )
        loop = Loop(
            cache,
            scheduler,
            executor,
            transfers=transfers,
            max_model_len=resolved.max_model_len,
            eos_token_ids=checkpoint.eos_token_ids,
            pin_budget=resolved.pin_budget,
            seed=resolved.seed,
        )
        on_failure.pop_all()
    return loop
