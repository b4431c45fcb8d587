"""The thread of ``CompileJobs``, and what passes between it and the loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from radixkv.errors import RequestError
from radixkv.runtime.finished import Finished
from radixkv.runtime.structured.compile_jobs import CompileJobs, Job
from radixkv.runtime.structured.messages import TrialLimits
from radixkv.runtime.structured.vocabulary import Vocabulary

if TYPE_CHECKING:
    from radixkv.runtime.structured.matcher import Grammar


class CompileThread:
    """Runs from construction to ``close``. One other thread calls the methods; only two of them wait."""

    def __init__(self, read_vocabulary: Callable[[], Vocabulary], limits: TrialLimits, deadline_s: float) -> None:
        self._outcomes: Finished[tuple[Job, Grammar | RequestError] | None] = Finished()
        """What was compiled or refused; None after a ``failure``."""
        self._is_settled = threading.Event()
        """Set when compiling can begin at once, or never will."""
        self.failure: Exception | None = None
        """Why nothing is compiled any more; None while things are."""
        self._jobs = CompileJobs(read_vocabulary, limits, deadline_s, self._end)
        self._loop = asyncio.new_event_loop()
        self._main = self._loop.create_task(self._jobs.run(self._is_settled.set))
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
            self._loop.call_soon_threadsafe(self._jobs.submit, job)

    def cancel(self, job: Job) -> None:
        """Begins no more trial of a specification."""
        with contextlib.suppress(RuntimeError):  # the thread has closed its loop
            self._loop.call_soon_threadsafe(self._jobs.cancel, job)

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

    def _end(self, job: Job, outcome: Grammar | RequestError) -> None:
        self._outcomes.add((job, outcome))
