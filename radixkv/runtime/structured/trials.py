"""Starts the process of trials, asks it, and replaces it when it dies."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from asyncio import Future
from collections.abc import Awaitable
from typing import Self

import msgspec

from radixkv.errors import InvalidRequest, RadixKVError, RequestError
from radixkv.processes.child_process import ChildProcess
from radixkv.runtime.structured.messages import (
    MAX_LINE_BYTES,
    TrialLimits,
    TrialRequest,
    TrialResult,
    TrialSetup,
    TrialsReady,
)
from radixkv.runtime.structured.source import Source
from radixkv.runtime.structured.vocabulary import Vocabulary
from radixkv.wire.structured_outputs import StructuredOutputs

COMMAND = (sys.executable, "-m", "radixkv.runtime.structured.trial_process")

_log = logging.getLogger(__name__)


class TrialsDied(RadixKVError):
    """The process of trials ended in the middle of a trial."""


class TrialTooSlow(InvalidRequest):
    """A specification could not be compiled within the deadline of its trial."""


class Trials:
    """A process that tries whether specifications can be compiled within their limits. Use ``start`` to create one.

    For asyncio. The process ends with the thread that started it.
    """

    def __init__(self, process: ChildProcess) -> None:
        self._process = process
        self._results: dict[int, Future[TrialResult]] = {}
        self._n_trials = 0
        self._reader: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, vocabulary: Awaitable[Vocabulary], limits: TrialLimits) -> Self:
        """Starts the process and waits until it can begin a trial, which takes 4 s.

        Args:
            vocabulary: the tokens, which may be read while the process starts.
            limits: what one trial may take.

        Raises:
            TrialsDied: the process ended before.
        """
        # Threads of a numerical library would be missing in the forked processes.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        trials = cls(await ChildProcess.start(COMMAND, environment=environment, max_line_bytes=MAX_LINE_BYTES))
        try:
            trials._process.send_line(msgspec.json.encode(TrialSetup(await vocabulary, limits)))
            if not (line := await trials._process.read_line()):
                raise TrialsDied(f"the process of trials ended with code {await trials._process.wait()}")
            msgspec.json.decode(line, type=TrialsReady)
        except BaseException:
            await trials._process.close()
            raise
        trials._reader = asyncio.create_task(trials._read())
        return trials

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    async def wait(self) -> None:
        """Waits until the process has ended."""
        assert self._reader is not None
        await asyncio.shield(self._reader)

    async def try_compiling(self, spec: StructuredOutputs, deadline_s: float) -> Source:
        """Returns the source of a specification that can be compiled. Trials run beside each other.

        Args:
            spec: the specification.
            deadline_s: how long the trial may take.

        Raises:
            TrialTooSlow: it cannot be compiled in that time.
            InvalidRequest: it cannot be compiled, or not within the limits of memory.
            RequestError: the trial itself failed.
            TrialsDied: the process ended.
        """
        if self._reader is None or self._reader.done():
            raise TrialsDied("the process of trials has ended")
        self._n_trials += 1
        trial_id = self._n_trials
        result: Future[TrialResult] = asyncio.get_running_loop().create_future()
        self._results[trial_id] = result
        try:
            self._process.send_line(msgspec.json.encode(TrialRequest(trial_id, spec, deadline_s)))
            outcome = await result
        finally:
            self._results.pop(trial_id, None)
        if outcome.failure:
            raise RequestError(f"the grammar could not be tried: {outcome.failure}")
        if outcome.is_late:
            raise TrialTooSlow(
                f"compiling it took longer than {deadline_s:g} s; make it smaller or simpler",
                param="structured_outputs",
            )
        if outcome.source is None:
            raise InvalidRequest(outcome.refusal, param="structured_outputs")
        return outcome.source

    async def close(self) -> None:
        """Kills the process and its trials."""
        await self._process.close()
        if self._reader is not None:
            await self._reader

    async def _read(self) -> None:
        try:
            while line := await self._process.read_line():
                result = msgspec.json.decode(line, type=TrialResult)
                if (waiting := self._results.get(result.id)) is not None and not waiting.done():
                    waiting.set_result(result)
        except (msgspec.DecodeError, ValueError) as error:  # ValueError: longer than MAX_LINE_BYTES
            _log.warning("the process of trials sent no result, and is killed: %s", error)
            self._process.kill()
        finally:
            for waiting in self._results.values():
                if not waiting.done():
                    waiting.set_exception(TrialsDied("the process of trials ended"))
