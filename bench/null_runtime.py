"""A runtime that computes nothing: what is left of a request's time is the frontend's.

It speaks the wire and gives every choice of a running request one token each step. The token says when it was sent,
by the clock that all processes of a machine share. Log-probabilities are made up; a prompt is scored in steps of
2,048 tokens, as the CPU's runtime does.

    argv: seconds a step
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

from radixkv.wire import (
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
    Stats,
    Submit,
    TokenLogprobs,
    Tokens,
    decode_to_runtime,
    encode,
    endpoint,
    pack_tokens,
)

_FIRST_ID, _N_IDS = 512, 3584
"""Most are words, of the sizes that words have."""
_TICK_NS = 500_000
READY = Ready(
    version=WIRE_VERSION,
    vocab_size=4096,
    max_model_len=1 << 18,
    page_size=16,
    n_pages=1 << 16,
    max_num_seqs=256,
    max_num_batched_tokens=2048,
    device="none",
    dtype="none",
)
HEARTBEAT_S = 0.5
_N_SCORED = 2048
"""Tokens of a prompt that a step scores."""


def figures(count: int) -> TokenLogprobs:
    """Log-probabilities of a token, and of so many others."""
    logprobs = struct.pack(f"<{count}f", *(-1.25 - place / 3 for place in range(count)))
    return TokenLogprobs(-1.25, 1, pack_tokens(range(_FIRST_ID, _FIRST_ID + count)), logprobs)


def stamp() -> bytes:
    """This moment, as a token."""
    return pack_tokens([_FIRST_ID + time.monotonic_ns() // _TICK_NS % _N_IDS])


def age_s(token: int, now_ns: int) -> float:
    """How long ago a stamp was made, up to a tick more; wrong for those older than 1.8 s."""
    return (now_ns - (token - _FIRST_ID) * _TICK_NS) % (_N_IDS * _TICK_NS) / 1e9


@dataclass
class _Running:
    submit: Submit
    n: int = 0
    n_scored: int = 1

    @property
    def n_prompt(self) -> int:
        return len(self.submit.tokens) // 4

    @property
    def done(self) -> Done:
        n_output = self.n * self.submit.sampling.n
        return Done(self.submit.id, "length", self.n_prompt, n_output, self.n_prompt // 2, 0.0)

    def score(self) -> PromptLogprobs | None:
        """The next stretch of the prompt, if it is to be scored and is not."""
        start, count = self.n_scored, self.submit.sampling.prompt_logprobs
        if count is None or start >= self.n_prompt:
            return None
        self.n_scored = min(self.n_prompt, start + _N_SCORED)
        return PromptLogprobs(self.submit.id, start, [figures(count)] * (self.n_scored - start))


class NullRuntime:
    """Requests in, stamps out."""

    def __init__(self, socket: zmq.Socket[bytes], step_s: float) -> None:
        self._socket = socket
        self._step_s = step_s
        self._running: dict[str, _Running] = {}
        self._peer = b""
        self._drains = False

    def run(self) -> None:
        """Until it is to drain, and has."""
        next_at = beat_at = time.monotonic()
        while self._running or not self._drains:
            now = time.monotonic()
            wait_s = max(0.0, next_at - now) if self._running else HEARTBEAT_S
            if self._socket.poll(wait_s * 1000):
                self._peer, frame = self._socket.recv_multipart()
                self._send(self._receive(decode_to_runtime(frame)))
            now = time.monotonic()
            if self._running and now >= next_at:
                next_at = max(now, next_at + self._step_s)
                self._send(self._step())
            if now - beat_at >= HEARTBEAT_S:
                beat_at = now
                self._send([Heartbeat()])

    def _receive(self, message: object) -> list[FromRuntime]:
        match message:
            case Hello():
                return [READY]
            case Submit():
                self._running[message.id] = _Running(message)
            case Cancel():
                if (request := self._running.pop(message.id, None)) is not None:
                    return [request.done]
            case GetStats():
                n = len(self._running)
                return [Stats(message.id, n, 0, READY.n_pages, READY.n_pages, *[0] * 8, *[0.0] * 4, 0)]
            case Drain():
                self._drains = True
        return []

    def _step(self) -> list[FromRuntime]:
        items: list[NewTokens] = []
        prompts: list[PromptLogprobs] = []
        ends: list[FromRuntime] = []
        for request_id, request in list(self._running.items()):
            sampling = request.submit.sampling
            if (scored := request.score()) is not None:
                prompts.append(scored)
                continue
            request.n += 1
            reason = "length" if request.n >= (sampling.max_tokens or 0) else None
            logprobs = None if sampling.logprobs is None else [figures(sampling.logprobs)]
            items += [
                NewTokens(request_id, stamp(), choice, reason, logprobs=logprobs) for choice in range(sampling.n)
            ]
            if reason is not None:
                ends.append(self._running.pop(request_id).done)
        return [Tokens(items, prompts), *ends]

    def _send(self, messages: list[FromRuntime]) -> None:
        if messages and self._peer:
            self._socket.send_multipart([self._peer, *map(encode, messages)])


@contextmanager
def _bound(socket_path: str) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(endpoint(socket_path))
        yield socket


def _end_with_frontend() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


def main() -> None:
    """Serves the frontend whose ``Start`` comes on standard input."""
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=Start)
    threading.Thread(target=_end_with_frontend, daemon=True).start()
    with _bound(start.socket_path) as socket:
        NullRuntime(socket, float(sys.argv[1])).run()


if __name__ == "__main__":
    main()
