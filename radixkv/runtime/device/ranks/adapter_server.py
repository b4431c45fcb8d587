"""The adapters of another rank, which come and go as rank 0 says."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import assert_never

from radixkv.errors import CheckpointError
from radixkv.processes.nice_threads import start_nice_thread
from radixkv.runtime.device.ranks.frames import (
    AdapterFrame,
    Frames,
    RankAdapterAnswer,
    RankAdapterCopy,
    RankAdapterDiscarded,
    RankAdapterFill,
    RankAdapterPut,
    RankAdapterRead,
    RankAdapterRemoved,
    RankAdapterWithdrawn,
    encode,
)
from radixkv.runtime.step.adapters import AdapterCopy, DeviceAdapters, ReadAdapter


@dataclass
class _Coming:
    """An adapter that is read or copied, and neither put nor discarded."""

    outcome: ReadAdapter | AdapterCopy | None = None
    """None: it could not be read, or is being read."""
    thread: threading.Thread | None = None
    """The thread that reads or copies it."""


class AdapterServer:
    """Does with a rank's adapters what rank 0 does with its own: threads read and copy, the rest is between plans.

    Args:
        adapters: of the rank.
        answers: to rank 0.
    """

    def __init__(self, adapters: DeviceAdapters, answers: Frames) -> None:
        self._adapters = adapters
        self._answers = answers
        self._coming: dict[int, _Coming] = {}
        """By ticket."""
        self._sending = threading.Lock()
        """Held while an answer is sent: several threads may have one."""

    def receive(self, frame: AdapterFrame) -> None:
        """Begins to read or to copy an adapter, lets rows ask for one, or frees one. Waits for no file."""
        match frame:
            case RankAdapterRead():
                self._begin(_Coming(), frame.ticket, lambda: self._read(frame))
            case RankAdapterCopy():
                self._coming[frame.ticket] = _Coming(self._adapters.copy(frame.digest))
            case RankAdapterFill():
                self._begin(self._coming[frame.ticket], frame.ticket, lambda: self._fill(frame.ticket))
            case RankAdapterPut():
                if (outcome := self._end(frame.ticket)) is not None:
                    outcome.put()
            case RankAdapterDiscarded():
                if (outcome := self._end(frame.ticket)) is not None:
                    outcome.discard()
            case RankAdapterWithdrawn():
                self._adapters.withdraw(frame.digest)
            case RankAdapterRemoved():
                self._adapters.remove(frame.digest)
            case _:
                assert_never(frame)

    def close(self) -> None:
        """Waits for threads."""
        for coming in self._coming.values():
            if coming.thread is not None:
                coming.thread.join()

    def _begin(self, coming: _Coming, ticket: int, work: Callable[[], RankAdapterAnswer]) -> None:
        """Starts a thread that answers with what ``work`` returns, or why it failed."""
        self._coming[ticket] = coming
        try:
            coming.thread = start_nice_thread(lambda: self._answer(ticket, work))
        except RuntimeError as error:  # Python's, where the system starts no more threads
            self._send(RankAdapterAnswer(ticket, failure=f"{type(error).__name__}: {error}"))

    def _answer(self, ticket: int, work: Callable[[], RankAdapterAnswer]) -> None:
        try:
            answer = work()
        except CheckpointError as error:
            answer = RankAdapterAnswer(ticket, refusal=str(error))
        except Exception as error:  # rank 0 waits for the answer, whatever has failed
            answer = RankAdapterAnswer(ticket, failure=f"{type(error).__name__}: {error}")
        self._send(answer)

    def _send(self, answer: RankAdapterAnswer) -> None:
        with self._sending, suppress(OSError):  # rank 0 has ended
            self._answers.send(encode(answer))

    def _read(self, frame: RankAdapterRead) -> RankAdapterAnswer:
        outcome = self._coming[frame.ticket].outcome = self._adapters.read(frame.name, frame.path)
        return RankAdapterAnswer(frame.ticket, outcome.digest)

    def _fill(self, ticket: int) -> RankAdapterAnswer:
        copy = self._coming[ticket].outcome
        assert isinstance(copy, AdapterCopy), "a copy comes before its fill"
        copy.fill()
        return RankAdapterAnswer(ticket)

    def _end(self, ticket: int) -> ReadAdapter | AdapterCopy | None:
        """Forgets what rank 0 has an answer to; returns what was read or copied."""
        coming = self._coming.pop(ticket)
        if coming.thread is not None:
            coming.thread.join()
        return coming.outcome
