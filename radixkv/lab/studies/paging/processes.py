"""Processes that work on the items of a list beside each other."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol, TypeVar

from radixkv.errors import RadixKVError

Item = TypeVar("Item")
Result = TypeVar("Result")


class ProcessDied(RadixKVError):
    """Raised if a process ended before its work was done."""


class NotSent(RadixKVError):
    """Raised in place of a result, or of an exception, that cannot be sent to another process."""


class Map(Protocol):
    """A function like ``map``: the results come in the order of the items, whoever computes them."""

    def __call__(self, function: Callable[[Item], Result], items: Iterable[Item], /) -> Iterator[Result]: ...


@contextmanager
def worker_processes(n_processes: int) -> Iterator[Map]:
    """Yields a ``Map`` that works on items in up to ``n_processes`` processes.

    Work on all items begins with the call, in the order of calls and items; further items are given out whenever a
    result is taken. Functions must be importable by name; items and results are pickled. An exception of a function
    is raised in place of its result. Starting a process costs about 0.4 s of processor time.

    The processes end with the context, whatever they do, and also when this process is killed. Ctrl-C reaches only
    this process.

    Args:
        n_processes: 1 yields ``map``, which works in this process when a result is taken.

    Raises:
        ProcessDied: a process ended, for instance because the kernel killed it when memory ran out.
        NotSent: what a function returned or raised cannot be pickled.
    """
    if n_processes == 1:
        yield map
        return
    workers = _Workers(n_processes)
    try:
        yield workers.map
    finally:
        workers.kill()


class _Workers:
    """Processes that each work on one item at a time."""

    def __init__(self, n_processes: int) -> None:
        self._n_processes = n_processes
        self._processes: list[BaseProcess] = []
        self._idle: list[Connection] = []
        self._process_of: dict[Connection, BaseProcess] = {}
        self._busy: dict[Connection, int] = {}
        """The number of the item that a process works on."""
        self._queued: deque[tuple[int, Callable[[Any], Any], Any]] = deque()
        """Items that no process works on yet: their number, their function and themselves."""
        self._n_items = 0
        self._outcomes: dict[int, Any] = {}
        """Results that nobody has taken yet, or the exception instead, by the number of the item."""

    def map(self, function: Callable[[Item], Result], items: Iterable[Item], /) -> Iterator[Result]:
        """Queues the items; returns an iterator of their results."""
        first = self._n_items
        for item in items:
            self._queued.append((self._n_items, function, item))
            self._n_items += 1
        self._give_out()
        return (self._take(number) for number in range(first, self._n_items))

    def kill(self) -> None:
        """Ends all processes at once."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in (*self._idle, *self._busy):
            connection.close()

    def _take(self, number: int) -> Any:
        while number not in self._outcomes:
            for connection in wait(tuple(self._busy)):
                assert isinstance(connection, Connection)
                self._receive(connection)
            self._give_out()
        outcome = self._outcomes.pop(number)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _give_out(self) -> None:
        while self._queued and (self._idle or len(self._processes) < self._n_processes):
            connection = self._idle.pop() if self._idle else self._start()
            number, *task = self._queued.popleft()
            self._busy[connection] = number
            with suppress(ConnectionError):  # the process has died, which ``_receive`` reports
                connection.send(task)

    def _receive(self, connection: Connection) -> None:
        try:
            outcome = connection.recv()
        except (EOFError, ConnectionError):
            process = self._process_of[connection]
            process.join()
            if process.exitcode == -signal.SIGKILL:
                raise ProcessDied(
                    "a process of this command was killed, as the kernel does when memory runs out; run it on "
                    "fewer cores, in fewer processes: taskset -c 0 radixkv ..."
                ) from None
            raise ProcessDied(
                f"a process of this command ended with exit code {process.exitcode} before its work was done; "
                "report what it printed"
            ) from None
        self._outcomes[self._busy.pop(connection)] = outcome
        self._idle.append(connection)

    def _start(self) -> Connection:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs,), daemon=True)
        # A new process inherits the signals that are blocked here. ``start`` would unblock SIGINT if it also had to
        # start the resource tracker.
        resource_tracker.ensure_running()
        blocked_before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
            self._processes.append(process)
            self._process_of[ours] = process
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked_before)
        theirs.close()
        return ours


def _work(connection: Connection) -> None:
    """Receives functions and items, and sends what the functions return or raise, until the other end is closed."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(EOFError, ConnectionError):
        while True:
            function, item = connection.recv()
            try:
                outcome = function(item)
            except Exception as error:
                error.add_note(f"in a process of its own:\n{traceback.format_exc()}")
                outcome = error
            connection.send_bytes(_pickled(outcome))


def _pickled(outcome: object) -> bytes:
    """Returns what ``Connection.recv`` reads as the outcome, or as ``NotSent`` if it cannot be pickled and read."""
    try:
        data = bytes(ForkingPickler.dumps(outcome))
        ForkingPickler.loads(data)
    except Exception:
        about = "".join(outcome.__notes__) if isinstance(outcome, Exception) else traceback.format_exc()
        refusal = NotSent(f"{type(outcome).__name__} cannot be sent between processes: {about}")
        return bytes(ForkingPickler.dumps(refusal))
    return data


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
