"""The frontend's end of the wire: requests in, their tokens out.

One DEALER socket. Each HTTP request is a ``Batch`` of answers that share one wake-up.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Iterable, Sequence
from types import TracebackType
from typing import Self, TypeVar

import msgspec
import zmq
import zmq.asyncio

from radixkv.errors import Draining, RequestError, WireError, request_error
from radixkv.frontend.http.errors import ClientTooSlow, RuntimeSilent
from radixkv.frontend.in_flight import Answer, Delta, Latencies, Prompt
from radixkv.wire import (
    MAX_FRAME_BYTES,
    WIRE_VERSION,
    Cancel,
    Done,
    Drain,
    Explain,
    Explained,
    Failed,
    Flush,
    Flushed,
    GetStats,
    Heartbeat,
    Hello,
    Ready,
    Stats,
    Submit,
    Tokens,
    ToRuntime,
    decode_from_runtime,
    encode,
    endpoint,
)

AnswerT = TypeVar("AnswerT", Flushed, Explained, Stats)

MAX_PENDING_BYTES = 1 << 20
"""Tokens and log-probabilities that wait for a stream's reader; with more than that waiting, new ones end it."""
ASK_TIMEOUT_S = 10.0
MAX_BYTES_A_TURN = 1 << 18
"""Of the runtime's messages that wait, taken together, so that readers who are behind catch up. Far less than may
wait for a reader, who has no turn meanwhile."""


class Batch:
    """The answers of one HTTP request. Leaving it cancels those that have not ended."""

    def __init__(self, client: Client, prompts: Sequence[Prompt], arrived: float, streams: bool) -> None:
        self._client = client
        self._wake = asyncio.Event()
        self._answers = [
            Answer(place, prompt.sampling.n, self._wake, arrived, streams=streams)
            for place, prompt in enumerate(prompts)
        ]
        self._n_open = sum(prompt.sampling.n for prompt in prompts)
        """Choices whose end is not counted."""
        client.submit(zip(self._answers, prompts, strict=True))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._client.latencies.ended("error" if isinstance(error, Exception) else "abort", self._n_open)
        for answer in self._answers:
            self._client.leave(answer)

    def end(self, delta: Delta, reason: str) -> None:
        """What a choice gained has ended it. Where the runtime does not know, asks it to; its end still comes."""
        self._n_open -= 1
        self._client.latencies.ended(reason)
        if delta.finish_reason is None:
            self._client.cancel(self._answers[delta.prompt], delta.choice)

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """What comes, in order for each choice, until all have ended. Raises ``RequestError``."""
        waiting = list(self._answers)
        while waiting:
            await self._wake.wait()
            self._wake.clear()
            for answer in list(waiting):
                deltas = answer.take()
                if answer.done is not None:
                    waiting.remove(answer)
                for delta in deltas:
                    yield delta


class Client:
    """The only socket of the frontend. Made and used inside one event loop.

    Raises:
        ConfigError: the socket's path is too long.
    """

    def __init__(self, socket_path: str, latencies: Latencies) -> None:
        address = endpoint(socket_path)
        self.latencies = latencies
        """Where measured times and ends go."""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        # No high-water mark: a send never blocks or drops, and what can pile up is bounded by the answers of
        # requests that the runtime admitted.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._socket.connect(address)
        self._answers: dict[str, Answer] = {}
        self._questions: dict[str, asyncio.Future[Flushed | Explained | Stats]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._receiving: asyncio.Task[None] | None = None
        self.refusal: RequestError | None = None
        """Why new requests are refused; None while they are taken."""
        self._failure: RequestError | None = None
        self.n_frames = 0
        """Grows while the runtime is alive."""
        self._n_frames_dropped = 0

    async def handshake(self) -> Ready:
        """Waits until the runtime has loaded its model. Raises ``WireError`` for another version."""
        self._send(Hello(version=WIRE_VERSION))
        message = decode_from_runtime((await self._socket.recv_multipart())[0])
        if not isinstance(message, Ready):
            raise WireError(f"the runtime answered the handshake with {type(message).__name__}, not Ready")
        if message.version != WIRE_VERSION:
            raise WireError(
                f"the runtime speaks wire version {message.version} and the frontend {WIRE_VERSION}; "
                "both must come from the same installation"
            )
        self._receiving = asyncio.create_task(self._receive())
        return message

    @property
    def in_flight(self) -> int:
        """Requests whose terminal message has not come."""
        return len(self._answers)

    def batch(self, prompts: Sequence[Prompt], *, arrived: float, streams: bool = True) -> Batch:
        """Submits prompts together. Raises the ``refusal``, if there is one.

        Args:
            prompts: of one HTTP request.
            arrived: when it came, in monotonic seconds.
            streams: whether a client reads what comes at once; one that does not is too slow.
        """
        return Batch(self, prompts, arrived, streams)

    async def idle(self) -> None:
        """Waits until nothing is in flight."""
        await self._idle.wait()

    async def flush(self) -> Flushed:
        """Makes all that is cached unreachable."""
        return await self._ask(Flush(id=uuid.uuid4().hex), Flushed)

    async def explain(self, tokens: bytes, cache_salt: str, *, contents: bool) -> Explained:
        """Why no more of these tokens is cached; without ``contents``, nothing finer than pages."""
        return await self._ask(Explain(uuid.uuid4().hex, tokens, cache_salt, contents), Explained)

    async def stats(self) -> Stats:
        """The runtime's counters at this moment; dropped frames are those of both processes."""
        stats = await self._ask(GetStats(id=uuid.uuid4().hex), Stats)
        n_dropped = stats.frames_dropped_total + self._n_frames_dropped
        return msgspec.structs.replace(stats, frames_dropped_total=n_dropped)

    def fail(self, error: RequestError) -> None:
        """Ends everything in flight with an error, and refuses what comes later with it."""
        self.refusal = self._failure = error
        for answer in self._answers.values():
            self.cancel(answer)
            answer.fail(error)
        for question in self._questions.values():
            if not question.done():
                question.set_exception(error)
        self._answers.clear()
        self._idle.set()

    def submit(self, requests: Iterable[tuple[Answer, Prompt]]) -> None:
        """Sends all prompts or none; their answers then gain tokens."""
        if self.refusal is not None:
            raise self.refusal.with_traceback(None)
        frames = [(answer, _frame(_submit(answer, prompt))) for answer, prompt in requests]
        for answer, frame in frames:
            self._socket.send(frame, zmq.NOBLOCK)
            self._answers[answer.id] = answer
            self._idle.clear()

    def cancel(self, answer: Answer, choice: int | None = None) -> None:
        """Asks the runtime to end an answer, or one choice of it. Does nothing for an answer that has ended."""
        if answer.id in self._answers:
            self._send(Cancel(id=answer.id, choice=choice))

    def leave(self, answer: Answer) -> None:
        """Cancels an answer that nobody will look at again."""
        self.cancel(answer)
        self._forget(answer.id)

    def drain(self) -> None:
        """Asks the runtime to end once it is idle."""
        self._send(Drain())

    async def close(self) -> None:
        """Fails what is in flight; ends the receiving task and the socket."""
        self.fail(self._failure or Draining("the server shut down before the answer was complete"))
        if self._receiving is not None:
            self._receiving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._receiving
        self._socket.close()
        self._context.term()

    async def _ask(self, question: Flush | Explain | GetStats, kind: type[AnswerT]) -> AnswerT:
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        future: asyncio.Future[Flushed | Explained | Stats] = asyncio.get_running_loop().create_future()
        self._questions[question.id] = future
        try:
            self._send(question)
            async with asyncio.timeout(ASK_TIMEOUT_S):
                answer = await future
        except TimeoutError:
            raise RuntimeSilent(f"the runtime did not answer within {ASK_TIMEOUT_S:.0f} s; try again") from None
        finally:
            del self._questions[question.id]
        if not isinstance(answer, kind):
            raise WireError(f"{type(question).__name__} was answered with {type(answer).__name__}")
        return answer

    def _send(self, message: ToRuntime) -> None:
        self._socket.send(_frame(message), zmq.NOBLOCK)

    async def _receive(self) -> None:
        while True:
            n_bytes = 0
            while n_bytes < MAX_BYTES_A_TURN:
                # What is there already comes without a turn of the loop, and is applied before any reader wakes:
                # an answer's last tokens and its end are one delta, and so is what came while readers were behind.
                frames = await self._socket.recv_multipart()
                n_bytes += sum(map(len, frames))
                self.n_frames += len(frames)
                for frame in frames:
                    self._apply(frame)
            await asyncio.sleep(0)

    def _apply(self, frame: bytes) -> None:
        try:
            message = decode_from_runtime(frame)
        except WireError:
            self._n_frames_dropped += 1
            return
        match message:
            case Tokens():
                for scored in message.prompts:
                    if (answer := self._reading(scored.id)) is not None:
                        answer.gain_prompt(scored)
                for item in message.items:
                    if (answer := self._reading(item.id)) is not None:
                        answer.gain(item, self.latencies)
            case Done():
                if (answer := self._forget(message.id)) is not None:
                    answer.end(message, self.latencies)
            case Failed():
                if (answer := self._forget(message.id)) is not None:
                    answer.fail(request_error(message.code, message.text, param=message.param))
            case Flushed() | Explained() | Stats():
                future = self._questions.get(message.id)
                if future is not None and not future.done():
                    future.set_result(message)
            case Heartbeat() | Ready():
                pass

    def _reading(self, request_id: str) -> Answer | None:
        """The answer that a message is for; None if nobody wants it, or its reader is too slow."""
        answer = self._answers.get(request_id)
        if answer is None or not answer.streams or answer.n_pending_bytes <= MAX_PENDING_BYTES:
            return answer
        self.leave(answer)
        answer.fail(ClientTooSlow(f"{answer.n_pending_bytes} bytes of the answer waited to be read; read faster"))
        return None

    def _forget(self, request_id: str) -> Answer | None:
        answer = self._answers.pop(request_id, None)
        if not self._answers:
            self._idle.set()
        return answer


def _submit(answer: Answer, prompt: Prompt) -> Submit:
    return Submit(
        id=answer.id,
        tokens=prompt.tokens,
        sampling=prompt.sampling,
        cache_salt=prompt.cache_salt,
        reads_cache=prompt.reads_cache,
        priority=prompt.priority,
    )


def _frame(message: ToRuntime) -> bytes:
    """The message, encoded. Raises ``WireError`` for one that the runtime would drop."""
    frame = encode(message)
    if len(frame) > MAX_FRAME_BYTES:
        raise WireError(f"a {type(message).__name__} has {len(frame)} bytes; at most {MAX_FRAME_BYTES}")
    return frame
