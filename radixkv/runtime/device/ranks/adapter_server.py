"""The adapters of another rank, which come and go as rank 0 says."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import assert_never

from radixkv.errors import CheckpointError, RadixKVError
from radixkv.processes.niceness import be_nicer
from radixkv.runtime.device.ranks.frames import (
    AdapterFrame,
    Frames,
    RankAdapterDiscarded,
    RankAdapterOpened,
    RankAdapterPut,
    RankAdapterRead,
    RankAdapterRemoved,
    encode,
)
from radixkv.runtime.step.adapters import DeviceAdapters, ReadAdapter


@dataclass
class _Read:
    """An adapter that a thread reads, or has read."""

    thread: threading.Thread
    outcome: ReadAdapter | None = None
    """None: it could not be read, or is being read."""


class AdapterServer:
    """Does with a rank's adapters what rank 0 does with its own: a thread reads, and the rest is between plans.

    Args:
        adapters: of the rank.
        answers: to rank 0.
    """

    def __init__(self, adapters: DeviceAdapters, answers: Frames) -> None:
        self._adapters = adapters
        self._answers = answers
        self._reads: dict[int, _Read] = {}
        """By ticket: those that were neither put nor discarded."""

    def receive(self, frame: AdapterFrame) -> None:
        """Begins to read an adapter, lets rows ask for one, or frees one. Waits for no file."""
        match frame:
            case RankAdapterRead():
                thread = threading.Thread(target=self._read, args=(frame,), name="radixkv-adapter", daemon=True)
                self._reads[frame.ticket] = _Read(thread)
                thread.start()
            case RankAdapterPut():
                if (read := self._end(frame.ticket)) is not None:
                    read.put()
            case RankAdapterDiscarded():
                if (read := self._end(frame.ticket)) is not None:
                    read.discard()
            case RankAdapterRemoved():
                self._adapters.remove(frame.digest)
            case _:
                assert_never(frame)

    def close(self) -> None:
        """Waits for threads that read."""
        for read in self._reads.values():
            read.thread.join()

    def _read(self, frame: RankAdapterRead) -> None:
        be_nicer()  # than steps
        try:
            outcome = self._adapters.read(frame.name, frame.path)
        except CheckpointError as error:
            answer = RankAdapterOpened(refusal=str(error))
        except (RadixKVError, RuntimeError, OSError, MemoryError) as error:
            answer = RankAdapterOpened(failure=f"{type(error).__name__}: {error}")
        else:
            self._reads[frame.ticket].outcome = outcome
            answer = RankAdapterOpened(outcome.digest)
        with suppress(OSError):  # rank 0 has ended
            self._answers.send(encode(answer))

    def _end(self, ticket: int) -> ReadAdapter | None:
        """Forgets a read that rank 0 has an answer to; returns what was read."""
        read = self._reads.pop(ticket)
        read.thread.join()
        return read.outcome
