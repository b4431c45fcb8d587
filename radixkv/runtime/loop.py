"""The runtime's loop: receive -> schedule -> launch -> commit -> send; alone in seeing scheduler and device.

One turn launches step n+1 and then takes the result of step n, so that the host works while the device runs. The
process (``main``) drives it from sockets, ``LLM`` from lists.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic, perf_counter

import numpy as np

from radixkv.checkpoints import Checkpoint
from radixkv.config import MAX_SEED, EngineConfig
from radixkv.errors import (
    ContextLengthExceeded,
    DeviceError,
    Draining,
    InvalidRequest,
    InvariantError,
    RequestError,
)
from radixkv.runtime.cache import PageCache
from radixkv.runtime.device.executor import CpuExecutor
from radixkv.runtime.plan import Executor, Pending, StepPlan
from radixkv.runtime.request import TOKEN_BYTES, Request
from radixkv.runtime.scheduler import Scheduler, Update
from radixkv.tree.node import Namespace
from radixkv.wire import (
    WIRE_VERSION,
    Cancel,
    Done,
    Drain,
    Failed,
    Flush,
    Flushed,
    FromRuntime,
    GetStats,
    NewTokens,
    Ready,
    Stats,
    Submit,
    Tokens,
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
        self._eos_token_ids = eos_token_ids
        self._seeds = random.Random(seed)
        self._clock = clock
        self._live: dict[str, Request] = {}
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
        )

    @property
    def has_work(self) -> bool:
        """Whether a turn would do anything."""
        return not self._scheduler.is_idle

    def receive(self, message: Submit | Cancel | Flush | GetStats | Drain) -> list[FromRuntime]:
        """Takes a message; gives what can be answered at once. O(tokens) for ``Submit``."""
        match message:
            case Submit():
                return self._submit(message)
            case Cancel():
                return self._cancel(message.id)
            case Flush():
                n_freed, n_leased = self._scheduler.cache.flush()
                return [Flushed(message.id, n_freed, n_leased)]
            case GetStats():
                return [self._stats(message.id)]
            case Drain():
                self.is_draining = True
                return []

    def turn(self) -> list[FromRuntime]:
        """Launches the next step, then takes the oldest launched one's result, if enough are launched."""
        begun = perf_counter()
        plan = self._scheduler.schedule()
        self._counters.schedule_seconds += perf_counter() - begun
        messages: list[FromRuntime] = []
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
                f"{self._scheduler.n_running} requests run and {len(self._scheduler.waiting)} wait, "
                "but none of them fits into a step"
            )
        self._counters.step_seconds += perf_counter() - begun
        return messages

    def check(self) -> None:
        """Every invariant of pages and tree. O(pages). Raises ``InvariantError``."""
        self._scheduler.check()

    def _submit(self, message: Submit) -> list[FromRuntime]:
        if message.id in self._live:
            return []  # The live request with this id will have its one terminal message.
        try:
            request = self._request(message)
            self._scheduler.add(request)
        except RequestError as error:
            return [Failed(message.id, error.code, str(error), error.param)]
        self._live[message.id] = request
        return []

    def _request(self, message: Submit) -> Request:
        if self.is_draining:
            raise Draining("the server is shutting down; send the request elsewhere")
        n_prompt, sampling = len(message.tokens) // TOKEN_BYTES, message.sampling
        self._check_tokens(message.tokens)
        cache = self._scheduler.cache
        n_room = min(self._max_model_len, cache.n_pages * cache.page_size + 1) - n_prompt
        max_tokens = n_room if sampling.max_tokens is None else sampling.max_tokens
        if n_room < 1 or max_tokens > n_room:
            raise ContextLengthExceeded(
                f"the prompt has {n_prompt} tokens and max_tokens is {sampling.max_tokens}, but the context is "
                f"{self._max_model_len} tokens and the pool {cache.n_pages * cache.page_size}; shorten one of them",
                param="max_tokens" if n_room >= 1 else "prompt",
            )
        stop_token_ids = frozenset(sampling.stop_token_ids)
        return Request(
            id=message.id,
            namespace=Namespace(salt=message.cache_salt),
            tokens=bytearray(message.tokens),
            n_prompt=n_prompt,
            max_tokens=max_tokens,
            temperature=sampling.temperature,
            top_k=max(0, sampling.top_k),
            top_p=sampling.top_p,
            seed=self._seeds.randint(0, MAX_SEED) if sampling.seed is None else sampling.seed,
            stop_token_ids=stop_token_ids if sampling.ignore_eos else stop_token_ids | self._eos_token_ids,
            reads_cache=message.reads_cache,
            received_at=self._clock(),
        )

    def _check_tokens(self, tokens: bytes) -> None:
        if not tokens or len(tokens) % TOKEN_BYTES:
            raise InvalidRequest(f"a prompt of {len(tokens)} bytes is not one or more int32 ids", param="prompt")
        ids = np.frombuffer(tokens, dtype="<i4")
        least, most = int(ids.min()), int(ids.max())
        if least < 0 or most >= self._executor.vocab_size:
            raise InvalidRequest(
                f"token id {least if least < 0 else most} is outside the vocabulary of {self._executor.vocab_size}",
                param="prompt",
            )

    def _cancel(self, request_id: str) -> list[FromRuntime]:
        request = self._live.get(request_id)
        if request is None:
            return []
        self._scheduler.abort(request)
        return [self._done(request, "abort")]

    def _collect(self) -> list[FromRuntime]:
        """The oldest launched step's result. If it failed, so has all that was launched on top of it."""
        plan, pending = self._launched.popleft()
        try:
            result = pending.result()
        except DeviceError:
            self._abandon()
            return self._report(self._scheduler.fail())
        messages = self._report(self._scheduler.complete(plan, result))
        self._scheduler.cache.check_counts()
        return messages

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
        ends: list[FromRuntime] = []
        for request, token, finish_reason, error in updates:
            if token is not None:
                items.append(NewTokens(request.id, token.to_bytes(TOKEN_BYTES, "little")))
                self._count_token(request)
            if error is not None:
                del self._live[request.id]
                ends.append(Failed(request.id, error.code, str(error), error.param))
            elif finish_reason is not None:
                ends.append(self._done(request, finish_reason, token))
        return [Tokens(items), *ends] if items else ends

    def _count_token(self, request: Request) -> None:
        self._counters.generation_tokens += 1
        if request.n_outputs == 1 and request.n_cached is not None:
            self._counters.prompt_tokens += request.n_prompt
            self._counters.prefix_queries += request.n_prompt
            self._counters.prefix_hits += request.n_cached

    def _done(self, request: Request, finish_reason: str, token: int | None = None) -> Done:
        del self._live[request.id]
        scheduled_at = self._clock() if request.scheduled_at is None else request.scheduled_at
        return Done(
            id=request.id,
            finish_reason=finish_reason,
            n_prompt_tokens=request.n_prompt,
            n_output_tokens=request.n_outputs,
            n_cached_tokens=request.n_cached or 0,
            queue_time_s=scheduled_at - request.received_at,
            stop_token_id=token if finish_reason == "stop" else None,
        )

    def _stats(self, stats_id: str) -> Stats:
        scheduler, cache, counters = self._scheduler, self._scheduler.cache, self._counters
        return Stats(
            id=stats_id,
            n_running=scheduler.n_running,
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
            frames_dropped_total=0,
        )


def build_loop(config: EngineConfig, checkpoint: Checkpoint) -> Loop:
    """Loads the model, makes the pool and the cache over it. Seconds.

    Raises:
        CheckpointError: the checkpoint is corrupt or of an unknown kind.
        ConfigError: the settings do not fit the checkpoint or the machine.
    """
    max_model_len = config.model.max_model_len or checkpoint.max_position_embeddings
    executor = CpuExecutor(
        checkpoint,
        page_size=config.cache.page_size,
        max_rows=config.scheduler.max_num_seqs,
        max_model_len=max_model_len,
        kv_cache_memory_bytes=config.cache.kv_cache_memory_bytes,
        max_total_tokens=config.cache.max_total_tokens,
    )
    cache = PageCache(executor.n_pages, config.cache.page_size, shares=config.cache.enable_prefix_caching)
    return Loop(
        Scheduler(cache, config.scheduler),
        executor,
        max_model_len=max_model_len,
        eos_token_ids=checkpoint.eos_token_ids,
        seed=config.seed,
    )
