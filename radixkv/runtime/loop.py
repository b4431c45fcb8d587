"""The engine loop: receive -> schedule -> launch -> complete -> send; the only user of both scheduler and device.

One turn launches step n+1 and then takes the result of step n, so that the host works while the device computes. If
rows of step n+1 are masked, the turn then fills their token masks, which need the result of step n.
The runtime process drives it with messages from a socket, ``LLM`` with messages from Python calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from time import monotonic, perf_counter
from typing import NamedTuple

from radixkv.errors import DeviceError, Draining, InvariantError, RequestError, queue_timeout
from radixkv.runtime.alarms import Alarms
from radixkv.runtime.finished import wait_readable
from radixkv.runtime.intake import Intake
from radixkv.runtime.launched_steps import LaunchedSteps
from radixkv.runtime.protocols.adapters import Adapters
from radixkv.runtime.protocols.gate import Gate
from radixkv.runtime.protocols.request import RequestBranch
from radixkv.runtime.request import Phase, Request, Update
from radixkv.runtime.scheduler.scheduler import Scheduler
from radixkv.runtime.step.executor import Executor
from radixkv.tree.node import TOKEN_BYTES
from radixkv.wire.adapter_messages import AdapterCommand, LoadAdapter, UnloadAdapter
from radixkv.wire.cache_messages import CacheCommand
from radixkv.wire.cache_use import CacheUse
from radixkv.wire.messages import (
    Cancel,
    ComputedPrompt,
    Done,
    DraftUse,
    Drain,
    Failed,
    FromRuntime,
    GetStats,
    NewTokens,
    PromptLogprobs,
    Ready,
    Submit,
    Tokens,
)
from radixkv.wire.stats import Stats
from radixkv.wire.table_messages import GetTables, Tabled

LOOKAHEAD = 1
"""Steps that stay launched when a turn ends: the device computes them while the host prepares the next one."""
_MAX_POOLED_BYTES = 4 << 20
"""Most bytes of pooled states in a message."""
_LAUNCH_DECAY = 0.9
"""By which the time that a launch may take falls from step to step, unless one takes longer."""
_MAX_CLOSE_S = 5.0
"""How long ``Loop.close`` may write pages to disk."""


@dataclass(slots=True)
class _LiveRequest:
    """A request without a terminal message yet."""

    choices: list[Request]
    n_unfinished: int
    """Choices whose end has not been reported yet."""
    is_counted: bool = False
    """Whether the counters include its prompt."""

    @property
    def cache_use(self) -> CacheUse:
        return sum((use for choice in self.choices if (use := choice.cache_use.counted) is not None), CacheUse())

    @property
    def n_outputs(self) -> int:
        return sum(choice.n_outputs for choice in self.choices if choice.known_key)  # none of one that never forked


class _Outgoing(NamedTuple):
    """What the frontend is to be told. Its messages can be made while the device computes."""

    updates: list[Update]
    """Updates with new tokens, or with what is pooled."""
    prompt_logprobs: list[PromptLogprobs]
    computed: list[ComputedPrompt]
    later: list[FromRuntime]
    """What comes after these, in order: whole outputs, and terminal messages."""

    def messages(self) -> list[FromRuntime]:
        """Makes the messages. O(updates)."""
        if self.updates or self.prompt_logprobs or self.computed:
            items = [update.new_tokens() for update in self.updates]
            if not items or items[-1].pooled is None:
                return [Tokens(items, self.prompt_logprobs, self.computed), *self.later]
            # With one task all items are pooled, and alike: those of a step may be more than a frame may have.
            n_items = max(1, _MAX_POOLED_BYTES // len(items[-1].pooled))
            first, *others = (items[start : start + n_items] for start in range(0, len(items), n_items))
            return [
                Tokens(first, self.prompt_logprobs, self.computed),
                *(Tokens(one, [], []) for one in others),
                *self.later,
            ]
        return self.later


@dataclass(slots=True)
class StepCounters:
    """What the loop counts itself, since the start."""

    cache_use: CacheUse = field(default_factory=CacheUse)
    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    schedule_seconds: float = 0.0
    device_busy_seconds: float = 0.0


class Loop:
    """Turns messages of the frontend into steps on the device, and their results into messages.

    Args:
        ready: the message that tells a frontend the sizes of model, pool and steps.
        scheduler: plans the steps.
        executor: the device.
        intake: makes requests of messages.
        adapters: those that requests may ask for.
        gate: holds requests back before the scheduler knows them.
        is_gated: whether a request needs the gate.
        branches: what requests may choose by their messages.
        run_command: carries out a message that looks at the cache or changes it.
        make_stats: makes the answer to ``GetStats``, of its id and what the loop has counted.
        make_tables: makes the answer to ``GetTables``, of the choices of each request that has not ended.
        alarms: calls that are due at a time.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        ready: Ready,
        scheduler: Scheduler,
        executor: Executor,
        *,
        intake: Intake,
        adapters: Adapters,
        gate: Gate,
        is_gated: Callable[[Submit], bool],
        branches: Sequence[RequestBranch],
        run_command: Callable[[CacheCommand], FromRuntime],
        make_stats: Callable[[str, StepCounters], Stats],
        make_tables: Callable[[GetTables, Iterable[Sequence[Request]]], Tabled],
        alarms: Alarms,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.ready = ready
        self.is_draining = False
        """Whether new requests are refused."""
        self.scheduler = scheduler
        self._executor = executor
        self._intake = intake
        self.adapters = adapters
        """Those that requests may ask for."""
        self._gate = gate
        self._is_gated = is_gated
        self._branches = branches
        self._run_command = run_command
        self._make_stats = make_stats
        self._make_tables = make_tables
        self._alarms = alarms
        self._clock = clock
        self._live: dict[str, _LiveRequest] = {}
        self._gated: dict[str, _LiveRequest] = {}
        """The live requests that the gate holds, the oldest first."""
        self._steps = LaunchedSteps(executor, scheduler.forecast, clock)
        self._launch_s = 0.0
        """The host's time to plan and launch a step: the longest lately."""
        self.is_waiting = False
        """Whether the last turn had nothing to do until pages are copied between tiers or the gate opens.

        Wait for a message, or until one of ``descriptors`` is readable, then call ``turn``."""
        self._counters = StepCounters()

    @property
    def has_work(self) -> bool:
        """Whether any request is held back, waiting, running or releasing, or an adapter comes or goes."""
        return bool(self._gated) or not self.scheduler.is_idle or self.adapters.is_busy

    @property
    def descriptors(self) -> list[int]:
        """Descriptors, one of which is readable when pages have been copied between tiers, an adapter is read, or
        the gate opens.

        Call ``turn`` then, or ``advance`` if there is no work."""
        descriptors = [*self.scheduler.tiers.descriptors(), *self.adapters.descriptors()]
        return [*descriptors, *self._gate.descriptors()] if self._gated else descriptors

    def advance(self) -> None:
        """Takes finished copies of pages and starts those that were offered. For a loop without work. O(pages).

        Raises:
            DeviceLost: the device was lost meanwhile.
        """
        self._executor.check()
        self._advance()

    def _advance(self) -> None:
        self._alarms.ring(self._clock())
        self.scheduler.tiers.advance()

    def wait(self, timeout_s: float) -> None:
        """Waits until one of ``descriptors`` is readable, at most ``timeout_s``."""
        wait_readable(self.descriptors, timeout_s)

    def receive(
        self, message: Submit | Cancel | CacheCommand | AdapterCommand | GetTables | GetStats | Drain
    ) -> list[FromRuntime]:
        """Takes a message; returns its immediate answers.

        O(tokens) for ``Submit``, ``Explain``, ``Match``, ``GetStored`` and ``Pin``; O(pages) for ``Flush``,
        ``Invalidate`` and ``CloseSession``; about a millisecond or two for ``Outline``; what ``make_tables`` costs
        for ``GetTables``.
        """
        match message:
            case Submit():
                return self._submit(message)
            case Cancel():
                return self._cancel(message)
            case GetStats():
                return [self._make_stats(message.id, self._counters)]
            case GetTables():
                return [self._make_tables(message, (live.choices for live in self._live.values()))]
            case Drain():
                self.is_draining = True
                return []
            case LoadAdapter() | UnloadAdapter():
                return self.adapters.receive(message)
            case _:
                return [self._run_command(message)]

    @property
    def seconds_for_arrivals(self) -> float:
        """How long the next turn can wait for more messages, so that requests among them join its step.

        The device computes meanwhile, and gets the next step in time: twice the time of a launch is left for that.
        Ask again after a few milliseconds at most: it is a forecast, and 0 once the device has finished.
        """
        return max(0.0, self._steps.seconds_left - 2 * self._launch_s) if self.has_work else 0.0

    def turn(self) -> list[FromRuntime]:
        """Fails timed-out requests, lets adapters come and go, launches the next step, then takes the oldest step's
        result.

        All results are taken before the plan if the scheduler wants them; messages about them are made behind the
        launch. If not, the oldest one is taken after the launch, if more than ``LOOKAHEAD`` steps are launched, or
        if nothing could be planned. Requests end when a result is taken, so that what follows them acts before the
        next plan. A launched step with masked rows is sampled after that, when all tokens before it are known.

        Raises:
            DeviceLost: the device cannot be used any more.
            InvariantError: a bug in radixkv.
        """
        if self.is_waiting:
            self._executor.check()  # no step would tell
        started, begun = perf_counter(), self._clock()
        if self._alarms.next_at <= begun:
            self._alarms.ring(begun)
        messages = [*self._admit_gated(), *self._expire()] if self._gated else self._expire()
        if self.adapters.is_busy:
            messages += self.adapters.advance(self._uses)
        outgoing: list[_Outgoing] = []
        if self._steps and self.scheduler.wants_results:
            while self._steps:
                outgoing.append(self._take_result())
            begun = self._clock()
        planned = perf_counter()
        plan = self.scheduler.schedule()
        self._counters.schedule_seconds += perf_counter() - planned
        if plan is not None:
            self._counters.steps += 1
            try:
                self._steps.launch(plan)
            except DeviceError:
                while self._steps:
                    outgoing.append(self._take_result())
                outgoing.append(self._apply(self.scheduler.fail()))
            self._launch_s = max(self._clock() - begun, _LAUNCH_DECAY * self._launch_s)
        for one in outgoing:  # while the device computes
            messages += one.messages()
        self.is_waiting = False
        if len(self._steps) > LOOKAHEAD or (plan is None and self._steps):
            messages += self._take_result().messages()
        elif plan is None and self.has_work:
            if not (self.scheduler.is_idle or self.scheduler.tiers.is_busy):
                raise InvariantError(
                    f"{len(self.scheduler.running)} requests are running, {len(self.scheduler.tiers)} loading "
                    f"and {len(self.scheduler.waiting)} waiting, but none of them fits into a step"
                )
            self.is_waiting = True
        messages += self._sample_step()
        if not self.has_work:
            self._advance()
        self._counters.step_seconds += perf_counter() - started
        return messages

    def close(self) -> None:
        """Frees the device's memory, even with steps in flight. Call once; the loop is unusable afterwards."""
        self._steps.drop()
        self._gate.close()
        self.adapters.close()
        self.scheduler.tiers.close(_MAX_CLOSE_S)
        self._executor.close()

    def check(self) -> None:
        """Checks every invariant of pages and tree. O(pages). Raises ``InvariantError``."""
        self.scheduler.check()

    def _submit(self, message: Submit) -> list[FromRuntime]:
        if message.id in self._live:
            return []  # The id is taken: the frontend expects one terminal message, that of the live request.
        choices: list[Request] = []
        try:
            if self.is_draining:
                raise Draining("the server is shutting down; send the request elsewhere")
            choices = self._intake.make_choices(message)
            followed = [one.follow(message, choices) for one in self._branches if one.is_chosen(message)]
            observers = tuple(observer for observer in followed if observer is not None)
            for choice in choices:
                choice.observers = observers
            live = _LiveRequest(choices, len(choices))
            if self._is_gated(message) and self._gate.hold(message, choices):
                self._gated[message.id] = live
                for choice in choices:
                    choice.phase = Phase.GATED
            else:
                self.scheduler.add(choices[0], choices[1:])
        except RequestError as error:
            for choice in choices:
                choice.continuation = None  # it refers to the choice, and the cyclic garbage collector is off
            return [Failed(message.id, error.code, str(error), error.param)]
        self._live[message.id] = live
        return []

    def _admit_gated(self) -> list[FromRuntime]:
        """Queues the requests that the gate lets pass; those that it refuses fail."""
        messages: list[FromRuntime] = []
        for choices, error in self._gate.take():
            del self._gated[choices[0].id]
            cancelled = [choice for choice in choices if choice.phase is Phase.FINISHED]
            if error is None:
                try:
                    self.scheduler.add(choices[0], choices[1:])
                except RequestError as full:
                    error = full
            if error is not None:
                del self._live[choices[0].id]
                messages.append(Failed(choices[0].id, error.code, str(error), error.param))
                continue
            for choice in cancelled:
                self.scheduler.abort(choice)
        return messages

    def _expire(self) -> list[FromRuntime]:
        """Fails the requests that have waited too long for their first step, also those that the gate holds."""
        messages = self._apply(self.scheduler.expire()).messages()
        if (limit_s := self.scheduler.limits.queue_timeout_s) is not None and self._gated:
            now = self._clock()
            for live in list(self._gated.values()):
                waited_s = now - live.choices[0].received_at
                if waited_s <= limit_s:
                    break
                error = queue_timeout(waited_s, limit_s)
                self._forget(live)
                messages.append(Failed(live.choices[0].id, error.code, str(error), error.param))
        return messages

    def _cancel(self, message: Cancel) -> list[FromRuntime]:
        live = self._live.get(message.id)
        if live is None:
            return []
        if message.choice is None:
            return [self._finish(live, "abort")]
        if not 0 <= message.choice < len(live.choices):
            return []
        choice = live.choices[message.choice]
        if choice.continuation is not None:  # its choices have no meaning without each other
            return [self._finish(live, "abort")]
        if choice.phase is Phase.FINISHED:
            return []
        if choice.phase is Phase.GATED:
            choice.phase = Phase.FINISHED
        else:
            self.scheduler.abort(choice)
        live.n_unfinished -= 1
        item = NewTokens(message.id, b"", message.choice, "abort")
        return [Tokens([item]), *([] if live.n_unfinished else [self._finish(live, "abort")])]

    def _uses(self, adapter: str) -> bool:
        """Returns whether a request or a launched step has the adapter of a digest. O(requests + rows)."""
        return any(live.choices[0].adapter.digest == adapter for live in self._live.values()) or any(
            row.adapter == adapter for plan in self.scheduler.launched_plans for row, _ in plan.rows()
        )

    def _sample_step(self) -> list[FromRuntime]:
        """Samples the newest step if it waits for token masks and all tokens before it are known."""
        if not self._steps.waits_for_masks:
            return []
        masks = self._gate.masks(self.scheduler.launched_plans[-1].rows(), self.ready.vocab_size)
        try:
            self._steps.sample(masks)
        except DeviceError:
            return self._apply(self.scheduler.fail()).messages()
        return []

    def _take_result(self) -> _Outgoing:
        """Takes the oldest launched step's result, and ends requests; returns what to tell of it.

        If the step failed, so have all steps launched after it.
        """
        try:
            plan, result = self._steps.take_result()
        except DeviceError:
            return self._apply(self.scheduler.fail())
        self.scheduler.tiers.step_done(plan, result.device_seconds)
        self._counters.device_busy_seconds += result.device_seconds
        started = perf_counter()
        updates = self.scheduler.complete(plan, result)
        self.scheduler.cache.check_counts()
        self._counters.schedule_seconds += perf_counter() - started
        return self._apply(updates)

    def _apply(self, updates: list[Update]) -> _Outgoing:
        """Counts new tokens, and ends the requests that are complete or have failed; returns what to tell of it."""
        with_tokens: list[Update] = []
        prompt_logprobs: list[PromptLogprobs] = []
        computed: list[ComputedPrompt] = []
        later: list[FromRuntime] = []
        for update in updates:
            request = update.request
            live = self._live.get(request.id)
            if live is None:
                continue  # Another choice of it has failed, and so the whole request.
            if update.prompt_logprobs is not None:
                prompt_logprobs.append(update.prompt_logprobs)
            if request.cache_use.counted is not None and not live.is_counted:
                self._count_prompt(live, request)
                computed.append(ComputedPrompt(request.id, live.cache_use))
            if update.error is not None:
                self._forget(live)
                later.append(Failed(request.id, update.error.code, str(update.error), update.error.param))
            elif update.tokens or update.pooled is not None:
                with_tokens.append(update)
                if not request.is_canary:
                    self._counters.generation_tokens += len(update.tokens)
            elif update.output is not None:
                # A message of its own: the whole outputs of several requests might not fit into one frame.
                later.append(Tokens([update.output]))
                self._counters.generation_tokens += len(update.output.tokens) // TOKEN_BYTES
            if update.finish_reason is not None:
                live.n_unfinished -= 1
                if not live.n_unfinished:
                    later.append(self._finish(live, update.finish_reason))
        return _Outgoing(with_tokens, prompt_logprobs, computed, later)

    def _count_prompt(self, live: _LiveRequest, request: Request) -> None:
        live.is_counted = True
        if request.is_canary:
            return
        self._counters.prompt_tokens += request.n_prompt
        self._counters.cache_use += live.cache_use

    def _forget(self, live: _LiveRequest) -> tuple[tuple[float, float] | None, DraftUse | None]:
        """Forgets a request, and aborts the choices that have not ended; returns what ``Tiers.ended`` and
        ``Drafts.ended`` do.

        The last choice goes first: an aborted leader would hand its prompt over to the next choice.
        """
        request_id = live.choices[0].id
        del self._live[request_id]
        if self._gated.pop(request_id, None) is not None:
            self._gate.leave(live.choices)
            for choice in live.choices:
                choice.phase = Phase.FINISHED
        for choice in reversed(live.choices):
            if choice.phase is not Phase.FINISHED:
                self.scheduler.abort(choice)
            choice.continuation = None  # it refers to the choice, and the cyclic garbage collector is off
        return self.scheduler.tiers.ended(live.choices), self.scheduler.drafts.ended(live.choices)

    def _finish(self, live: _LiveRequest, finish_reason: str) -> Done:
        waited, drafts = self._forget(live)
        now, first = self._clock(), live.choices[0]
        for observer in first.observers:
            observer.ended(live.choices, is_prompt_computed=live.is_counted)
        first_rows = [choice.first_row for choice in live.choices if choice.first_row is not None]
        scheduled_at = min((row.scheduled_at for row in first_rows), default=now)
        return Done(
            id=first.id,
            finish_reason=finish_reason,
            n_prompt_tokens=first.n_prompt,
            n_output_tokens=live.n_outputs,
            cache_use=live.cache_use,
            queue_time_s=scheduled_at - first.received_at,
            load_interval_s=waited and (waited[0] - first.received_at, waited[1] - first.received_at),
            miss=next((row.miss for row in first_rows if row.miss is not None), None),
            drafts=drafts,
            kv_eviction=None if first.kv_eviction is None else first.kv_eviction.use,
        )
