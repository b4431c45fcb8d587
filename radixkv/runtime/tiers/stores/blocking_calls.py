"""Awaits calls that block, and may do so for long, without keeping the process from ending."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

_IDLE_S = 1.0
"""After so long without a call a thread ends."""

_T = TypeVar("_T")


class _Call(NamedTuple):
    """A call that waits for a thread, and what gets its result."""

    function: Callable[[], Any]
    future: Future[Any]


class CallThreads:
    """Daemon threads for calls that block. Each call has a thread at once, an idle one if there is one.

    Threads of an executor would keep the process from ending while a call hangs. A new thread for each call would
    take longer than most calls: whoever starts it waits until it runs.

    Args:
        name: the threads'.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[_Call] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        """Counts the idle threads for which no call is on its way."""

    async def run(self, function: Callable[[], _T]) -> _T:
        """Awaits a blocking call. Nobody waits for it any more if this is cancelled.

        Raises:
            RuntimeError: no thread can be started. The function is not called.
        """
        future: Future[_T] = Future()
        future.set_running_or_notify_cancel()  # so that it cannot be cancelled
        if not self._idle.acquire(blocking=False):
            threading.Thread(target=self._run_calls, name=self._name, daemon=True).start()
        self._calls.put(_Call(function, future))  # once a thread is sure to take it
        return await asyncio.wrap_future(future)

    def _run_calls(self) -> None:
        """Runs calls until there is none for a while."""
        while True:
            try:
                call = self._calls.get(timeout=_IDLE_S)
            except Empty:
                if self._idle.acquire(blocking=False):
                    return
                continue  # a call is on its way
            try:
                call.future.set_result(call.function())
            except Exception as error:
                call.future.set_exception(error)
            del call  # an idle thread keeps neither the function nor its result
            self._idle.release()
