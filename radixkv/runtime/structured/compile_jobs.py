"""Compiles specifications one after another or side by side: first in the process of trials, then in this one."""

from __future__ import annotations

import asyncio
import logging
from asyncio import Event, Semaphore, Task
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from radixkv.errors import RequestError
from radixkv.runtime.structured.messages import TrialLimits
from radixkv.runtime.structured.source import Source
from radixkv.runtime.structured.trials import Trials, TrialsDied
from radixkv.runtime.structured.vocabulary import Vocabulary
from radixkv.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from radixkv.runtime.structured.compiler import Compiler
    from radixkv.runtime.structured.matcher import Grammar

ResultT = TypeVar("ResultT")

MAX_JOBS = 4
"""Most specifications that are compiled at once. A slow one delays others only if there are as many slow ones."""
MAX_DEATHS = 3
"""How often the process of trials may die under a specification before the request fails."""
RESTART_TIMEOUT_S = 60.0
"""How long a specification waits for the process of trials to be started again."""
PAUSE_S = 1.0
"""Time until the process is started again after that failed."""

_log = logging.getLogger(__name__)


class CompileJobs:
    """Tasks that compile. All methods run in one event loop.

    Args:
        read_vocabulary: called once, in a thread.
        limits: what one trial may take.
        end: called with each specification and its grammar, or the reason why there is none.
    """

    def __init__(
        self,
        read_vocabulary: Callable[[], Vocabulary],
        limits: TrialLimits,
        end: Callable[[StructuredOutputs, Grammar | RequestError], None],
    ) -> None:
        self._read_vocabulary = read_vocabulary
        self._limits = limits
        self._end = end
        self._executor = ThreadPoolExecutor(MAX_JOBS, "radixkv-compile")
        self._slots = Semaphore(MAX_JOBS)
        self._trials: Trials | None = None
        self._compiler: Compiler | None = None
        self._is_open = Event()
        """Set while there is a process of trials."""
        self._queued: dict[StructuredOutputs, Task[None]] = {}
        """Tasks that have not begun to compile."""
        self._tasks: set[Task[None]] = set()

    async def run(self, opened: Callable[[], None]) -> None:
        """Keeps a process of trials until it is cancelled; then ends everything.

        Args:
            opened: called once, when compiling can begin at once.

        Raises:
            RadixKVError: the vocabulary could not be read, or the first process could not be started.
        """
        vocabulary = asyncio.create_task(self._in_thread(self._read_vocabulary))
        compiler = asyncio.create_task(self._open_compiler(vocabulary))
        try:
            trials = await Trials.start(vocabulary, self._limits)
            self._compiler = await compiler
            opened()
            while True:
                self._trials = trials
                self._is_open.set()
                await trials.wait()
                self._is_open.clear()
                _log.warning("the process that tries grammars ended; it is started again")
                trials = await self._restart(vocabulary)
        finally:
            for task in (vocabulary, compiler, *self._tasks):
                task.cancel()
            await asyncio.gather(vocabulary, compiler, *self._tasks, return_exceptions=True)
            if self._trials is not None:
                await self._trials.close()
            self._executor.shutdown()

    def submit(self, spec: StructuredOutputs) -> None:
        """Compiles a specification when there is room."""
        task = asyncio.create_task(self._compile(spec))
        self._queued[spec] = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self, spec: StructuredOutputs) -> None:
        """Does not compile a specification, unless that has begun."""
        if (task := self._queued.pop(spec, None)) is not None:
            task.cancel()

    async def _compile(self, spec: StructuredOutputs) -> None:
        outcome: Grammar | RequestError
        try:
            async with self._slots:
                await self._wait_until_open()
                self._queued.pop(spec, None)
                source = await self._try(spec)
                outcome = await self._in_thread(lambda: self._open(source))
        except RequestError as error:
            outcome = error
        except Exception as error:  # whatever it is, the request must end
            _log.exception("a grammar could not be compiled")
            outcome = RequestError(
                f"the grammar could not be compiled: {type(error).__name__}; see the server's log"
            )
        self._end(spec, outcome)

    async def _try(self, spec: StructuredOutputs) -> Source:
        for _ in range(MAX_DEATHS):
            await self._wait_until_open()
            assert self._trials is not None
            try:
                return await self._trials.try_compiling(spec)
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
        return Grammar(self._compiler.compile(source))

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
