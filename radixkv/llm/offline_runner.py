"""The loop of ``LLM``: submits the requests of a call, and takes turns until all have ended."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from radixkv.errors import ConfigError, request_error
from radixkv.runtime.loop import Loop
from radixkv.tree.node import TOKEN_BYTES
from radixkv.wire.adapter_messages import LoadAdapter, UnloadAdapter
from radixkv.wire.messages import Cancel, Done, Failed, FromRuntime, NewTokens, PromptLogprobs, Submit, Tokens

_MAX_WAIT_S = 0.1
"""How long to wait at a time for pages from the host tier: between waits, Ctrl-C is noticed."""
_MAX_SUBMITS_PER_TURN = 128
"""Most prompts encoded and submitted between two steps: 10 ms of work for long ones, all that a step can start."""


class RunRequest(Protocol):
    """One request of a call, with what the loop has sent for it."""

    is_done: bool
    """Whether the loop has sent its last message."""

    @property
    def submit(self) -> Submit:
        """The message that starts it."""

    def add(self, item: NewTokens) -> bool:
        """Adds output of one choice; returns whether the choice has ended and the loop does not know."""

    def add_prompt_logprobs(self, item: PromptLogprobs) -> None:
        """Adds the logprobs of a range of prompt tokens."""

    def finish(self, done: Done) -> None:
        """Takes the last message."""


class OfflineRunner:
    """Runs the requests of one call at a time, or waits for an answer of the loop.

    Args:
        open_loop: returns the loop; raises ``ConfigError`` once it is closed.
        max_queued: most requests in the loop's queue.
    """

    def __init__(self, open_loop: Callable[[], Loop], max_queued: int) -> None:
        self._open_loop = open_loop
        self._max_queued = max_queued
        self._is_busy = False

    def run(self, requests: Iterable[RunRequest]) -> Generator[tuple[int, int], None, None]:
        """Runs requests to their end; yields the numbers of finished requests and of new tokens after each turn.

        Requests are taken from the iterator a few per turn, so that the device computes while most prompts are
        still to be encoded. Closing the generator cancels all unfinished requests.
        """
        loop = self._idle_loop()
        self._is_busy = True
        waiting = iter(requests)
        by_id: dict[str, RunRequest] = {}
        n_done, n_tokens, is_all_sent = 0, 0, False
        try:
            while n_done < len(by_id) or not is_all_sent:
                loop = self._open_loop()
                with _deferred_interrupts():
                    max_sent = min(self._max_queued + n_done, len(by_id) + _MAX_SUBMITS_PER_TURN)
                    while len(by_id) < max_sent and not is_all_sent:
                        request = next(waiting, None)
                        if request is None:
                            is_all_sent = True
                        else:
                            by_id[request.submit.id] = request
                            n_done += _apply(loop, loop.receive(request.submit), by_id)
                    if loop.has_work:
                        if loop.is_waiting:
                            loop.wait(_MAX_WAIT_S)
                        messages = loop.turn()
                        n_done += _apply(loop, messages, by_id)
                        items = [item for one in messages if isinstance(one, Tokens) for item in one.items]
                        n_tokens += sum([len(item.tokens) for item in items]) // TOKEN_BYTES
                yield n_done, n_tokens
        finally:  # also after an error or Ctrl-C: no request may outlive the call
            self._is_busy = False
            with _deferred_interrupts():
                for request in by_id.values():
                    if not request.is_done:
                        loop.receive(Cancel(request.submit.id))

    def answer(self, message: LoadAdapter) -> FromRuntime:
        """Returns the loop's answer to a message that it answers later. No request may run."""
        messages = self._idle_loop().receive(message)
        return next(iter(messages or self.settle()))

    def tell(self, message: UnloadAdapter) -> None:
        """Sends the loop a message without an answer, and lets it do what that asks for. No request may run."""
        self._idle_loop().receive(message)
        self.settle()

    def settle(self) -> list[FromRuntime]:
        """Takes turns until the loop has no work; returns its messages. No request may run."""
        loop, messages = self._idle_loop(), list[FromRuntime]()
        while loop.has_work:
            if loop.is_waiting:
                loop.wait(_MAX_WAIT_S)
            with _deferred_interrupts():
                messages += loop.turn()
        return messages

    def _idle_loop(self) -> Loop:
        """Returns the loop. Raises ``ConfigError`` if it is closed, or answers another call."""
        loop = self._open_loop()
        if self._is_busy:
            raise ConfigError("this LLM is answering another call; finish or close that one first")
        return loop


def _apply(loop: Loop, messages: Sequence[FromRuntime], requests: Mapping[str, RunRequest]) -> int:
    """Applies the loop's messages; returns how many requests ended. Raises the error of a failed request."""
    n_done = 0
    for message in messages:
        match message:
            case Tokens(items, prompt_logprobs):
                for logprobs in prompt_logprobs:
                    requests[logprobs.id].add_prompt_logprobs(logprobs)
                for item in items:
                    if requests[item.id].add(item):
                        n_done += _apply(loop, loop.receive(Cancel(item.id, item.choice)), requests)
            case Done():
                requests[message.id].finish(message)
                n_done += 1
            case Failed():
                raise request_error(message.code, message.text, param=message.param)
            case _:
                raise AssertionError(f"the loop does not send {message!r} unasked")
    return n_done


@contextmanager
def _deferred_interrupts() -> Iterator[None]:
    """Defers Ctrl-C to the end of the block, so that it leaves no step half done.

    Python interrupts only the main thread; others are unaffected.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    noted: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: noted.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if noted:
        signal.raise_signal(signal.SIGINT)


@contextmanager
def paused_collector() -> Iterator[None]:
    """Disables Python's cyclic garbage collector during the block.

    A full collection takes as long as several steps. Steps create no reference cycles, so nothing accumulates.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
