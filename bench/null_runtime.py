"""A runtime process that computes nothing, to measure the frontend alone.

It speaks the wire protocol and gives every choice of a running request one token per step. The token encodes the
time at which it was sent, on the monotonic clock that all processes of a machine share. Logprobs are synthetic;
prompt logprobs come in ranges of 2,048 tokens per step, as from the CPU runtime.

    argv: seconds per step, or "gpu" for steps as long as those of a modelled GPU (modelled_steps.py); optionally
    "submitted": the first token of an answer then encodes when its request was received
"""

from __future__ import annotations

import os
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import zmq
from modelled_steps import ModelledPrompt, ModelledSteps

from radixkv.wire.cache_messages import Match, Matched, TierMatch
from radixkv.wire.cache_use import CacheUse
from radixkv.wire.messages import (
    WIRE_VERSION,
    Cancel,
    Done,
    Drain,
    FromRuntime,
    GetStats,
    Heartbeat,
    Hello,
    NewTokens,
    PromptLogprobs,
    Ready,
    Start,
    Submit,
    TokenLogprobs,
    Tokens,
    decode_to_runtime,
    encode,
    endpoint,
    pack_tokens,
)
from radixkv.wire.stats import Stats

_FIRST_ID, _N_IDS = 512, 3584
"""Token ids used as stamps; most of them are ordinary words, with ordinary lengths."""
_TICK_NS = 500_000
READY = Ready(
    version=WIRE_VERSION,
    vocab_size=4096,
    max_model_len=1 << 18,
    page_size=16,
    n_pages=1 << 16,
    max_num_seqs=512,
    max_num_batched_tokens=2048,
    device="none",
    dtype="none",
)
HEARTBEAT_S = 0.5
_N_PROMPT_LOGPROBS = 2048
"""Tokens of a prompt whose logprobs a step reports."""


def synthetic_logprobs(count: int) -> TokenLogprobs:
    """Returns synthetic logprobs of a token and of ``count`` top tokens."""
    logprobs = struct.pack(f"<{count}f", *(-1.25 - rank / 3 for rank in range(count)))
    return TokenLogprobs(-1.25, 1, pack_tokens(range(_FIRST_ID, _FIRST_ID + count)), logprobs)


def stamp() -> bytes:
    """Returns the current time as a token."""
    return pack_tokens([_FIRST_ID + time.monotonic_ns() // _TICK_NS % _N_IDS])


def age_s(token: int, now_ns: int) -> float:
    """Returns the age of a stamp, up to one tick too high; wrong for stamps older than 1.8 s."""
    return (now_ns - (token - _FIRST_ID) * _TICK_NS) % (_N_IDS * _TICK_NS) / 1e9


@dataclass
class _Running:
    submit: Submit
    received: bytes
    """A stamp."""
    n_steps: int = 0
    prompt_logprobs_end: int = 1

    @property
    def n_prompt(self) -> int:
        return len(self.submit.tokens) // 4

    @property
    def done(self) -> Done:
        n_output = self.n_steps * self.submit.sampling.n
        return Done(self.submit.id, "length", self.n_prompt, n_output, CacheUse(self.n_prompt // 2), 0.0)

    def next_prompt_logprobs(self) -> PromptLogprobs | None:
        """Returns the next range of prompt logprobs; None if none are requested or none are left."""
        start, count = self.prompt_logprobs_end, self.submit.sampling.prompt_logprobs
        if count is None or start >= self.n_prompt:
            return None
        self.prompt_logprobs_end = min(self.n_prompt, start + _N_PROMPT_LOGPROBS)
        return PromptLogprobs(
            self.submit.id, start, [synthetic_logprobs(count)] * (self.prompt_logprobs_end - start)
        )


class NullRuntime:
    """Serves one frontend: gives each running request one stamp per choice and step.

    Args:
        socket: to the frontend.
        step_s: time of a step. None: that of a modelled GPU, which has no prompt logprobs.
        stamps_receipt: whether an answer's first token encodes when its request was received.
    """

    def __init__(self, socket: zmq.Socket[bytes], step_s: float | None, *, stamps_receipt: bool) -> None:
        self._socket = socket
        self._step_s = step_s
        self._steps = ModelledSteps()
        self._modelled: dict[str, ModelledPrompt] = {}
        """The prompts of running requests, if a GPU is modelled."""
        self._rows: list[str] = []
        """The requests that get a token at the end of the modelled step."""
        self._stamps_receipt = stamps_receipt
        self._running: dict[str, _Running] = {}
        self._peer = b""
        self._is_draining = False

    def run(self) -> None:
        """Serves until a ``Drain`` has come and no request is left."""
        next_at = beat_at = time.monotonic()
        while self._running or not self._is_draining:
            now = time.monotonic()
            wait_s = max(0.0, next_at - now) if self._running else HEARTBEAT_S
            if self._socket.poll(wait_s * 1000):
                self._peer, frame = self._socket.recv_multipart()
                self._send(self._receive(decode_to_runtime(frame)))
                continue  # until all that has arrived is taken
            now = time.monotonic()
            if self._running and now >= next_at:
                if self._step_s is not None:
                    next_at = max(now, next_at + self._step_s)
                    self._send(self._step(list(self._running)))
                else:
                    self._send(self._step(self._finished_rows()))
                    next_at = now + self._launch()
            if now - beat_at >= HEARTBEAT_S:
                beat_at = now
                self._send([Heartbeat()])

    def _receive(self, message: object) -> list[FromRuntime]:
        match message:
            case Hello():
                return [READY]
            case Submit():
                self._running[message.id] = _Running(message, stamp())
                if self._step_s is None:
                    n_output = message.sampling.max_tokens or 1
                    self._modelled[message.id] = self._steps.add(message.tokens, n_output)
            case Match():
                matches = [
                    TierMatch(len(tokens) // 4, self._steps.n_cached(tokens), 0, 0) for tokens in message.prompts
                ]
                return [Matched(message.id, tuple(matches), 0, 0, 0, 0)]
            case Cancel():
                if (modelled := self._modelled.pop(message.id, None)) is not None:
                    self._steps.cancel(modelled)
                if (request := self._running.pop(message.id, None)) is not None:
                    return [request.done]
            case GetStats():
                n_running = len(self._running)
                return [Stats(message.id, n_running, n_pages=READY.n_pages, n_pages_free=READY.n_pages)]
            case Drain():
                self._is_draining = True
        return []

    def _launch(self) -> float:
        """Plans a modelled step; returns how long it takes."""
        step_s, rows = self._steps.plan()
        ids = {id(prompt): request_id for request_id, prompt in self._modelled.items()}
        self._rows = [ids[id(prompt)] for prompt in rows]
        return step_s if self._steps.has_work else 0.0

    def _finished_rows(self) -> list[str]:
        """Ends the modelled step; returns the requests that get a token."""
        rows = [request_id for request_id in self._rows if request_id in self._modelled]
        self._steps.finish([self._modelled[request_id] for request_id in rows])
        return rows

    def _step(self, request_ids: list[str]) -> list[FromRuntime]:
        """Gives requests a token."""
        items: list[NewTokens] = []
        all_prompt_logprobs: list[PromptLogprobs] = []
        terminal: list[FromRuntime] = []
        for request_id in request_ids:
            request = self._running[request_id]
            sampling = request.submit.sampling
            if (prompt_logprobs := request.next_prompt_logprobs()) is not None:
                all_prompt_logprobs.append(prompt_logprobs)
                continue
            request.n_steps += 1
            reason = "length" if request.n_steps >= (sampling.max_tokens or 0) else None
            logprobs = None if sampling.logprobs is None else [synthetic_logprobs(sampling.logprobs)]
            token = request.received if self._stamps_receipt and request.n_steps == 1 else stamp()
            items += [
                NewTokens(request_id, token, choice, reason, logprobs=logprobs) for choice in range(sampling.n)
            ]
            if reason is not None:
                terminal.append(self._running.pop(request_id).done)
                self._modelled.pop(request_id, None)
        return [Tokens(items, all_prompt_logprobs), *terminal] if items or all_prompt_logprobs else []

    def _send(self, messages: list[FromRuntime]) -> None:
        if messages and self._peer:
            self._socket.send_multipart([self._peer, *map(encode, messages)])


@contextmanager
def _bind(socket_path: str) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(endpoint(socket_path))
        yield socket


def _exit_with_frontend() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


def main() -> None:
    """Serves the frontend that writes a ``Start`` line to standard input."""
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=Start)
    threading.Thread(target=_exit_with_frontend, daemon=True).start()
    with _bind(start.socket_path) as socket:
        step_s = None if sys.argv[1] == "gpu" else float(sys.argv[1])
        NullRuntime(socket, step_s, stamps_receipt="submitted" in sys.argv[2:]).run()


if __name__ == "__main__":
    main()
