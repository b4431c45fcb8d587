"""Compiles specifications in a thread, a few at a time: first in the process of trials, then in this one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from asyncio import Event, Task
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from radixkv.errors import RequestError
from radixkv.runtime.finished import Finished
from radixkv.runtime.structured.fair_slots import FairSlots
from radixkv.runtime.structured.forced_texts import forces_short_texts
from radixkv.runtime.structured.messages import TrialLimits
from radixkv.runtime.structured.source import Source
from radixkv.runtime.structured.trials import Trials, TrialsDied, TrialTooSlow
from radixkv.runtime.structured.vocabulary import Vocabulary
from radixkv.wire.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from radixkv.runtime.structured.compiler import Compiler
    from radixkv.runtime.structured.matcher import Grammar

ResultT = TypeVar("ResultT")

QUICK_S = 1.0
"""How long the first trial of a specification may take. One that takes longer is tried again among the slow ones,
so that it delays quick ones by no more."""
MAX_QUICK_JOBS = 3
"""Most specifications in their first trial, or compiled after it, at once."""
MAX_SLOW_JOBS = 2
"""Most specifications in their second trial, or compiled after it, at once."""
MAX_DEATHS = 3
"""How often the process of trials may die under a specification before the request fails."""
RESTART_TIMEOUT_S = 60.0
"""How long a specification waits for the process of trials to be started again."""
PAUSE_S = 1.0
"""Time until the process is started again after that failed."""

_log = logging.getLogger(__name__)


class Job(NamedTuple):
    """What is compiled, and for whom: a sender's grammars neither wait behind those of others nor displace them."""

    sender: str
    spec: StructuredOutputs


@dataclass(slots=True, eq=False)
class _Compilation:
    """What becomes of a job."""

    job: Job
    task: Task[None] | None = None
    is_waiting: bool = True
    """Whether no trial is under way and none has succeeded."""


class CompileJobs:
    """Compiles from construction to ``close``, in a thread with an event loop.

    Tenants take turns, and slow specifications have slots of their own. One other thread calls the methods; only
    ``wait_until_ready`` and ``close`` wait.

    Args:
        read_vocabulary: called once, in a thread.
        limits: what one trial may take.
        deadline_s: longest time that a trial may take.
    """

    def __init__(self, read_vocabulary: Callable[[], Vocabulary], limits: TrialLimits, deadline_s: float) -> None:
        self._read_vocabulary = read_vocabulary
        self._limits = limits
        self._deadline_s = deadline_s
        self.failure: Exception | None = None
        """Why nothing is compiled any more; None while things are."""
        self._outcomes: Finished[tuple[Job, Grammar | RequestError] | None] = Finished()
        """What was compiled or refused; None after a ``failure``."""
        self._is_settled = threading.Event()
        """Set when compiling can begin at once, or never will."""
        self._executor = ThreadPoolExecutor(MAX_QUICK_JOBS + MAX_SLOW_JOBS, "radixkv-compile")
        self._quick_slots = FairSlots(MAX_QUICK_JOBS)
        self._slow_slots = FairSlots(MAX_SLOW_JOBS)
        self._trials: Trials | None = None
        self._compiler: Compiler | None = None
        self._is_open = Event()
        """Set while there is a process of trials."""
        self._compilations: dict[Job, _Compilation] = {}
        """Compilations that somebody waits for."""
        self._tasks: set[Task[None]] = set()
        self._is_ending = False
        """Whether no compilation begins any more: its task might outlive the event loop."""
        self._loop = asyncio.new_event_loop()
        self._main = self._loop.create_task(self._keep_trials())
        self._thread = threading.Thread(target=self._run, name="radixkv-grammars", daemon=True)
        self._thread.start()

    def wait_until_ready(self) -> None:
        """Waits until compiling can begin at once.

        Raises:
            RadixKVError: the vocabulary could not be read, or the process of trials could not be started.
        """
        self._is_settled.wait()
        if self.failure is not None:
            raise self.failure

    def fileno(self) -> int:
        """Returns a descriptor that is readable while ``take`` has something to return, and after a failure."""
        return self._outcomes.fileno()

    def submit(self, job: Job) -> None:
        """Compiles a specification when it is its turn. Does nothing after a ``failure``."""
        with contextlib.suppress(RuntimeError):  # the thread has closed its loop
            self._loop.call_soon_threadsafe(self._begin, job)

    def cancel(self, job: Job) -> None:
        """Begins no more trial of a specification."""
        with contextlib.suppress(RuntimeError):  # the thread has closed its loop
            self._loop.call_soon_threadsafe(self._leave, job)

    def take(self) -> list[tuple[Job, Grammar | RequestError]]:
        """Returns what was compiled or refused since the last call."""
        return [outcome for outcome in self._outcomes.take() if outcome is not None]

    def close(self) -> None:
        """Ends the process of trials and the thread; waits for what this process compiles."""
        with contextlib.suppress(RuntimeError):  # the thread has failed and closed its loop
            self._loop.call_soon_threadsafe(self._main.cancel)
        self._thread.join()
        self._outcomes.close()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                runner.run(self._wait())
            except asyncio.CancelledError:
                pass
            except Exception as error:
                self.failure = error
                self._is_settled.set()
                self._outcomes.add(None)

    async def _wait(self) -> None:
        await self._main

    async def _keep_trials(self) -> None:
        """Keeps a process of trials until it is cancelled; then ends everything.

        Raises:
            RadixKVError: the vocabulary could not be read, or the first process could not be started.
        """
        vocabulary = asyncio.create_task(self._in_thread(self._read_vocabulary))
        compiler = asyncio.create_task(self._open_compiler(vocabulary))
        try:
            trials = await Trials.start(vocabulary, self._limits)
            self._compiler = await compiler
            self._is_settled.set()
            while True:
                self._trials = trials
                self._is_open.set()
                await trials.wait()
                self._is_open.clear()
                _log.warning("the process that tries grammars ended; it is started again")
                trials = await self._restart(vocabulary)
        finally:
            self._is_ending = True
            for task in (vocabulary, compiler, *self._tasks):
                task.cancel()
            await asyncio.gather(vocabulary, compiler, *self._tasks, return_exceptions=True)
            if self._trials is not None:
                await self._trials.close()
            self._executor.shutdown()

    def _begin(self, job: Job) -> None:
        if self._is_ending:
            return
        compilation = self._compilations[job] = _Compilation(job)
        compilation.task = asyncio.create_task(self._compile(compilation))
        self._tasks.add(compilation.task)
        compilation.task.add_done_callback(self._tasks.discard)

    def _leave(self, job: Job) -> None:
        compilation = self._compilations.pop(job, None)
        if compilation is not None and compilation.is_waiting and compilation.task is not None:
            compilation.task.cancel()

    async def _compile(self, compilation: _Compilation) -> None:
        job = compilation.job
        outcome: Grammar | RequestError | None
        try:
            outcome = await self._compile_in_turn(compilation)
        except RequestError as error:
            outcome = error
        except Exception as error:  # whatever it is, the request must end
            _log.exception("a grammar could not be compiled")
            outcome = RequestError(
                f"the grammar could not be compiled: {type(error).__name__}; see the server's log"
            )
        if self._compilations.get(job) is compilation:
            del self._compilations[job]
        if outcome is not None:
            self._outcomes.add((job, outcome))

    async def _compile_in_turn(self, compilation: _Compilation) -> Grammar | None:
        """Returns None if nobody waits for a slow grammar any more."""
        try:
            return await self._compile_in_slot(compilation, self._quick_slots, min(QUICK_S, self._deadline_s))
        except TrialTooSlow:
            if self._deadline_s <= QUICK_S:
                raise
        if self._compilations.get(compilation.job) is not compilation:
            return None
        return await self._compile_in_slot(compilation, self._slow_slots, self._deadline_s)

    async def _compile_in_slot(self, compilation: _Compilation, slots: FairSlots, deadline_s: float) -> Grammar:
        compilation.is_waiting = True
        async with slots.slot(compilation.job.sender):
            await self._wait_until_open()
            compilation.is_waiting = False
            source = await self._try(compilation.job.spec, deadline_s)
            return await self._in_thread(lambda: self._open(source))

    async def _try(self, spec: StructuredOutputs, deadline_s: float) -> Source:
        for _ in range(MAX_DEATHS):
            await self._wait_until_open()
            assert self._trials is not None
            try:
                return await self._trials.try_compiling(spec, deadline_s)
            except TrialsDied:
                self._is_open.clear()
        raise RequestError(f"the process that tries grammars died {MAX_DEATHS} times; send the request again")

    async def _wait_until_open(self) -> None:
        try:
            async with asyncio.timeout(RESTART_TIMEOUT_S):
                await self._is_open.wait()
        except TimeoutError:
            raise RequestError("the process that tries grammars does not start; see the server's log") from None

    def _open(self, source: Source) -> Grammar:
        from radixkv.runtime.structured.matcher import Grammar

        assert self._compiler is not None
        spelling = self._compiler.spelling if forces_short_texts(source) else None
        return Grammar(self._compiler.compile(source), spelling)

    async def _open_compiler(self, vocabulary: Task[Vocabulary]) -> Compiler:
        read = await vocabulary

        def compiler() -> Compiler:
            # Imported here because it takes seconds: the process of trials imports it at the same time.
            from radixkv.runtime.structured.compiler import Compiler

            compiler = Compiler(read, n_threads=self._limits.n_threads, cache_bytes=self._limits.grammar_bytes)
            compiler.warm_up()
            return compiler

        return await self._in_thread(compiler)

    async def _restart(self, vocabulary: Task[Vocabulary]) -> Trials:
        while True:
            try:
                return await Trials.start(vocabulary, self._limits)
            except (TrialsDied, OSError) as error:
                _log.warning("%s; it is started again in %g s", error, PAUSE_S)
                await asyncio.sleep(PAUSE_S)

    async def _in_thread(self, function: Callable[[], ResultT]) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)
