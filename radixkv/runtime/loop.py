"""The runtime's loop: receive -> schedule -> launch -> commit -> send; alone in seeing scheduler and device.

One turn launches step n+1 and then takes the result of step n, so that the host works while the device runs. The
process (``main``) drives it from sockets, ``LLM`` from lists.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic, perf_counter

from radixkv.checkpoints import Checkpoint
from radixkv.config import EngineConfig, with_defaults
from radixkv.errors import DeviceError, Draining, InvariantError, RequestError
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.device.factory import choose_device, open_executor
from radixkv.runtime.intake import Intake
from radixkv.runtime.request import Phase, Request, Update
from radixkv.runtime.scheduler.scheduler import Scheduler
from radixkv.runtime.step.executor import Executor
from radixkv.runtime.step.plan import StepPlan
from radixkv.runtime.step.result import Pending
from radixkv.tree.node import TOKEN_BYTES
from radixkv.wire import (
    WIRE_VERSION,
    Cancel,
    Done,
    Drain,
    Explain,
    Explained,
    Failed,
    Flush,
    Flushed,
    FromRuntime,
    GetStats,
    NewTokens,
    PromptLogprobs,
    Ready,
    Stats,
    Submit,
    Tokens,
    unpack_tokens,
)

LOOKAHEAD = 1
"""Steps that are launched before the oldest one's result is taken."""


@dataclass(slots=True)
class _Counters:
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    schedule_seconds: float = 0.0
    attention_seconds: float = 0.0


@dataclass(slots=True)
class _Live:
    """A request whose end is not out yet."""

    choices: list[Request]
    n_open: int
    """Choices whose end is not out yet."""
    is_counted: bool = False
    """Whether its prompt is in the counters."""

    @property
    def n_cached(self) -> int:
        return sum(choice.n_cached or 0 for choice in self.choices)

    @property
    def n_outputs(self) -> int:
        return sum(choice.n_outputs for choice in self.choices)


class Loop:
    """Requests in, tokens out.

    Args:
        scheduler: over a cache as large as the executor's pool.
        executor: the device.
        max_model_len: longest prompt and answer together, in tokens.
        eos_token_ids: end an answer, unless its request ignores them.
        seed: draws the seeds of requests that bring none.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        max_model_len: int,
        eos_token_ids: frozenset[int] = frozenset(),
        seed: int = 0,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.is_draining = False
        """Whether new requests are refused."""
        self._scheduler = scheduler
        self._executor = executor
        self._max_model_len = max_model_len
        self._clock = clock
        self._intake = Intake(
            vocab_size=executor.vocab_size,
            max_model_len=max_model_len,
            n_pool_tokens=scheduler.cache.n_pages * scheduler.cache.page_size,
            eos_token_ids=eos_token_ids,
            seed=seed,
            clock=clock,
        )
        self._live: dict[str, _Live] = {}
        self._launched: deque[tuple[StepPlan, Pending]] = deque()
        self._counters = _Counters()

    @property
    def ready(self) -> Ready:
        """What a frontend needs to know."""
        return Ready(
            version=WIRE_VERSION,
            vocab_size=self._executor.vocab_size,
            max_model_len=self._max_model_len,
            page_size=self._scheduler.cache.page_size,
            n_pages=self._scheduler.cache.n_pages,
            max_num_seqs=self._scheduler.max_num_seqs,
            max_num_batched_tokens=self._scheduler.max_num_batched_tokens,
            device=self._executor.device,
            dtype=self._executor.dtype,
        )

    @property
    def has_work(self) -> bool:
        """Whether a turn would do anything."""
        return not self._scheduler.is_idle

    def receive(self, message: Submit | Cancel | Flush | Explain | GetStats | Drain) -> list[FromRuntime]:
        """Takes a message; gives what can be answered at once. O(tokens) for ``Submit`` and ``Explain``."""
        match message:
            case Submit():
                return self._submit(message)
            case Cancel():
                return self._cancel(message)
            case Flush():
                n_freed, n_leased = self._scheduler.cache.flush()
                return [Flushed(message.id, n_freed, n_leased)]
            case Explain():
                return [self._explain(message)]
            case GetStats():
                return [self._stats(message.id)]
            case Drain():
                self.is_draining = True
                return []

    def turn(self) -> list[FromRuntime]:
        """Ends what has waited too long; launches the next step; then takes the oldest launched one's result, if
        enough are launched.

        Raises:
            InvariantError: a bug in radixkv.
        """
        begun = perf_counter()
        messages = self._report(self._scheduler.expire())
        plan = self._scheduler.schedule()
        self._counters.schedule_seconds += perf_counter() - begun
        if plan is not None:
            self._counters.steps += 1
            try:
                self._launched.append((plan, self._executor.launch(plan)))
            except DeviceError:
                while self._launched:
                    messages += self._collect()
                messages += self._report(self._scheduler.fail())
        if len(self._launched) > LOOKAHEAD or (plan is None and self._launched):
            messages += self._collect()
        elif plan is None and self.has_work:
            raise InvariantError(
                f"{len(self._scheduler.running)} requests run and {len(self._scheduler.waiting)} wait, "
                "but none of them fits into a step"
            )
        self._counters.step_seconds += perf_counter() - begun
        return messages

    def close(self) -> None:
        """Gives the device's memory back, once, whatever is under way. The loop is of no use after it."""
        self._launched.clear()
        self._executor.close()

    def check(self) -> None:
        """Every invariant of pages and tree. O(pages). Raises ``InvariantError``."""
        self._scheduler.check()

    def _submit(self, message: Submit) -> list[FromRuntime]:
        if message.id in self._live:
            return []  # The live request with this id will have its one terminal message.
        try:
            if self.is_draining:
                raise Draining("the server is shutting down; send the request elsewhere")
            choices = self._intake.choices(message)
            self._scheduler.add(choices[0], choices[1:])
        except RequestError as error:
            return [Failed(message.id, error.code, str(error), error.param)]
        self._live[message.id] = _Live(choices, len(choices))
        return []

    def _cancel(self, message: Cancel) -> list[FromRuntime]:
        live = self._live.get(message.id)
        if live is None:
            return []
        if message.choice is None:
            return [self._end(live, "abort")]
        if not 0 <= message.choice < len(live.choices):
            return []
        choice = live.choices[message.choice]
        if choice.phase is Phase.ENDED:
            return []
        self._scheduler.abort(choice)
        live.n_open -= 1
        item = NewTokens(message.id, b"", message.choice, "abort")
        return [Tokens([item]), *([] if live.n_open else [self._end(live, "abort")])]

    def _explain(self, message: Explain) -> FromRuntime:
        try:
            self._intake.check_prompt(message.tokens)
            namespace = self._intake.namespace(message.cache_salt)
        except RequestError as error:
            return Failed(message.id, error.code, str(error), error.param)
        found = self._scheduler.cache.tree.explain(namespace, message.tokens, contents=message.contents)
        place, token = found.first_difference, None
        if place is not None:
            (token,) = unpack_tokens(message.tokens[place * TOKEN_BYTES : (place + 1) * TOKEN_BYTES])
        return Explained(
            id=message.id,
            n_tokens=len(message.tokens) // TOKEN_BYTES,
            n_cached=found.n_tokens,
            reason=found.reason,
            first_difference=place,
            token=token,
            cached_token=found.cached_token,
            n_cached_elsewhere=found.n_tokens_elsewhere,
        )

    def _collect(self) -> list[FromRuntime]:
        """The oldest launched step's result. If it failed, so has all that was launched on top of it."""
        plan, pending = self._launched.popleft()
        try:
            result = pending.result()
        except DeviceError:
            self._abandon()
            return self._report(self._scheduler.fail())
        self._counters.attention_seconds += result.attention_seconds
        begun = perf_counter()
        updates = self._scheduler.complete(plan, result)
        self._scheduler.cache.check_counts()
        self._counters.schedule_seconds += perf_counter() - begun
        return self._report(updates)

    def _abandon(self) -> None:
        """Waits for the steps behind a failed one; what they computed counts for nothing."""
        while self._launched:
            _, pending = self._launched.popleft()
            try:
                pending.result()
            except DeviceError:
                continue

    def _report(self, updates: list[Update]) -> list[FromRuntime]:
        items: list[NewTokens] = []
        prompts: list[PromptLogprobs] = []
        ends: list[FromRuntime] = []
        for update in updates:
            request = update.request
            live = self._live.get(request.id)
            if live is None:
                continue  # Another of its choices has failed.
            if update.scores is not None:
                prompts.append(update.scores)
            if update.error is not None:
                self._drop(live)
                ends.append(Failed(request.id, update.error.code, str(update.error), update.error.param))
            elif update.token is not None:
                items.append(_new_tokens(update, update.token))
                if not live.is_counted:
                    self._count_prompt(live, request)
            if update.finish_reason is not None:
                live.n_open -= 1
                if not live.n_open:
                    ends.append(self._end(live, update.finish_reason))
        self._counters.generation_tokens += len(items)
        return [Tokens(items, prompts), *ends] if items or prompts else ends

    def _count_prompt(self, live: _Live, request: Request) -> None:
        live.is_counted = True
        self._counters.prompt_tokens += request.n_prompt
        self._counters.prefix_queries += request.n_prompt
        self._counters.prefix_hits += live.n_cached

    def _drop(self, live: _Live) -> None:
        """Ends what goes on of a request. The last choices first, or each would hand the prompt to the next."""
        del self._live[live.choices[0].id]
        for choice in reversed(live.choices):
            if choice.phase is not Phase.ENDED:
                self._scheduler.abort(choice)

    def _end(self, live: _Live, finish_reason: str) -> Done:
        self._drop(live)
        now, first = self._clock(), live.choices[0]
        scheduled_at = min((c.scheduled_at for c in live.choices if c.scheduled_at is not None), default=now)
        return Done(
            id=first.id,
            finish_reason=finish_reason,
            n_prompt_tokens=first.n_prompt,
            n_output_tokens=live.n_outputs,
            n_cached_tokens=live.n_cached,
            queue_time_s=scheduled_at - first.received_at,
        )

    def _stats(self, stats_id: str) -> Stats:
        scheduler, cache, counters = self._scheduler, self._scheduler.cache, self._counters
        return Stats(
            id=stats_id,
            n_running=len(scheduler.running),
            n_waiting=len(scheduler.waiting),
            n_pages=cache.n_pages,
            n_pages_free=cache.n_free,
            n_pages_evictable=cache.n_available - cache.n_free,
            prefix_queries_total=counters.prefix_queries,
            prefix_hits_total=counters.prefix_hits,
            prompt_tokens_total=counters.prompt_tokens,
            generation_tokens_total=counters.generation_tokens,
            preemptions_total=scheduler.n_preemptions,
            pages_evicted_total=cache.n_evicted,
            steps_total=counters.steps,
            step_seconds=counters.step_seconds,
            schedule_seconds=counters.schedule_seconds,
            cache_seconds=cache.seconds,
            attention_seconds=counters.attention_seconds,
            frames_dropped_total=0,
        )


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
    """Loads the model, makes the pool and the cache over it. Seconds.

    Raises:
        CheckpointError: the checkpoint is corrupt or of an unknown kind.
        ConfigError: the settings do not fit the checkpoint or the machine.
    """
    config = with_defaults(config, choose_device(config.model.device, checkpoint))
    max_model_len = config.model.max_model_len or checkpoint.max_position_embeddings
    executor = open_executor(config, checkpoint, max_model_len)
    try:
        cache = PageCache(executor.n_pages, config.cache.page_size, shares=config.cache.enable_prefix_caching)
        return Loop(
            Scheduler(cache, config.scheduler, finds_shared_runs=executor.wants_shared_runs),
            executor,
            max_model_len=max_model_len,
            eos_token_ids=checkpoint.eos_token_ids,
            seed=config.seed,
        )
    except BaseException:
        executor.close()
        raise
