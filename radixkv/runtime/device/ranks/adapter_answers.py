"""Answers of another rank about adapters, each of which goes to the thread that waits for it."""

from __future__ import annotations

from collections.abc import Callable
from threading import Condition

from radixkv.runtime.device.ranks.frames import Frames, RankAdapterAnswer, decode


class AdapterAnswers:
    """The answers of one rank, in any order.

    One of the threads that wait receives for all of them, until its own answer comes; then another one does.

    Args:
        frames: from the rank.
        lost: makes the error if the rank has ended.
    """

    def __init__(self, frames: Frames, lost: Callable[[], Exception]) -> None:
        self._frames = frames
        self._lost = lost
        self._changed = Condition()
        self._answers: dict[int, RankAdapterAnswer] = {}
        """Answers that no thread has taken, by ticket."""
        self._is_receiving = False

    def take(self, ticket: int) -> RankAdapterAnswer:
        """Waits for the answer to what was asked with a ticket. Any thread may call it.

        Raises:
            Exception: what ``lost`` returns; the rank has ended.
        """
        with self._changed:
            while ticket not in self._answers:
                if self._is_receiving:
                    self._changed.wait()
                else:
                    self._receive()
            return self._answers.pop(ticket)

    def _receive(self) -> None:
        """Waits for the next answer of the rank, without the lock."""
        self._is_receiving = True
        self._changed.release()
        try:
            frame = self._frames.receive()
        finally:
            self._changed.acquire()
            self._is_receiving = False
            self._changed.notify_all()
        if frame is None:
            raise self._lost()
        answer: RankAdapterAnswer = decode(frame, RankAdapterAnswer)
        self._answers[answer.ticket] = answer
