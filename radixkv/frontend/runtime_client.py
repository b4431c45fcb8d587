"""The frontend's end of the wire to the runtime process.

There is one DEALER socket.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import msgspec
import zmq
import zmq.asyncio

from radixkv.errors import Draining, QueueFull, RequestError, WireError, request_error
from radixkv.frontend.arrival import Arrival
from radixkv.frontend.http.errors import ClientTooSlow, RuntimeRestarting, RuntimeSilent, request_not_found
from radixkv.frontend.in_flight import EndedRequest, InFlightRequest, RequestMetrics, WakeUp
from radixkv.frontend.miss_counts import MissCounts, MissRecord
from radixkv.frontend.miss_report import without_contents, without_copies
from radixkv.frontend.request_group import RequestGroup
from radixkv.wire.adapter_messages import (
    AdapterLoaded,
    LoadAdapter,
    ServedAdapter,
    UnloadAdapter,
)
from radixkv.wire.cache_messages import (
    BeginPause,
    CacheCommand,
    CacheReply,
    CloseSession,
    EndPause,
    Explain,
    Explained,
    Flush,
    Flushed,
    GetStored,
    Invalidate,
    Invalidated,
    Match,
    Matched,
    Outline,
    Outlined,
    Pin,
    Pinned,
    SessionClosed,
    Stored,
    Tier,
)
from radixkv.wire.messages import (
    MAX_FRAME_BYTES,
    WIRE_VERSION,
    Cancel,
    Done,
    Drain,
    Failed,
    GetStats,
    Heartbeat,
    Hello,
    Ready,
    Submit,
    Tokens,
    ToRuntime,
    decode_from_runtime,
    encode,
    endpoint,
)
from radixkv.wire.namespace import CacheNamespace
from radixkv.wire.stats import Stats
from radixkv.wire.table_messages import GetTables, Tabled

Reply: TypeAlias = CacheReply | AdapterLoaded | Tabled | Stats
ReplyT = TypeVar("ReplyT", bound=Reply)

MAX_PENDING_BYTES = 1 << 20
"""Limit on the unread output of a stream. A stream above it fails when more arrives."""
QUERY_TIMEOUT_S = 10.0
"""How long the runtime may take to reply to a query, such as ``Explain`` or ``GetStats``."""
LOAD_TIMEOUT_S = 600.0
"""How long the runtime may take to load an adapter."""
MAX_BYTES_PER_TURN = 1 << 18
"""Bytes of runtime messages applied before readers run, so that readers who are behind catch up.

It is far less than ``MAX_PENDING_BYTES``, because no reader runs meanwhile.
"""
MAX_SHOWN_REQUESTS = 16
"""Prompts of one HTTP request whose block tables are shown."""
READERS_PER_BURST = 32
"""How many readers' parts are written in a row, once all of them are rendered.

The client is then awake when the next part comes, so fewer writes have to wake it; and the first of a step's parts
does not wait for all others.
"""


class RuntimeClient:
    """Sends requests to the runtime and distributes its output. Created and used inside one event loop.

    ``connect`` and ``handshake`` connect it to a runtime, and after ``fail`` to another one.

    Args:
        metrics: records latencies and finish reasons.
        misses: records what requests do not find in the cache; None: a record of this client's own.
        shows_contents: False hides what other clients have sent. Misses then tell only of whole pages with the
            request's own salt, counts of cached tokens leave out tokens copied from a part of a page, and those of
            drafts are rounded down to multiples of a page's tokens.
        max_pending_bytes: the most output that a reader may leave unread; more ends its request.
        query_timeout_s: the longest wait for the answer to a query.
    """

    def __init__(
        self,
        metrics: RequestMetrics,
        misses: MissRecord | None = None,
        *,
        shows_contents: bool = True,
        max_pending_bytes: int = MAX_PENDING_BYTES,
        query_timeout_s: float = QUERY_TIMEOUT_S,
    ) -> None:
        self._max_pending_bytes = max_pending_bytes
        self._query_timeout_s = query_timeout_s
        self.metrics = metrics
        """Records latencies and finish reasons."""
        self._misses = misses or MissRecord()
        self._shows_contents = shows_contents
        self._page_size = 1
        """Tokens per page of the present runtime."""
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        """The socket to the present runtime."""
        self._requests: dict[str, InFlightRequest] = {}
        self._queries: dict[str, asyncio.Future[Reply]] = {}
        self._idle = asyncio.Event()
        self._n_expected = 0
        """Prompts that groups which have begun will send."""
        self.load = 0.0
        """The sum of ``InFlightRequest.load`` of requests that have not received their terminal message."""
        self._idle.set()
        self._receiving: asyncio.Task[None] | None = None
        self._woken: dict[WakeUp, None] = {}
        """Whose readers have new output."""
        self._outgoing: list[bytes] = []
        """Frames that the event loop sends in its next turn."""
        self.refusal: RequestError | None = None
        """The error that refuses new requests; None while the server accepts them."""
        self.on_end: list[Callable[[EndedRequest], None]] = []
        """Called at the end of each request that a client sent."""
        self.send_elsewhere: Callable[[InFlightRequest], bool] = lambda request: False
        """Takes a request that the runtime has refused because its queue is full; returns False to let it fail."""
        self._failure: RequestError | None = None
        """The error that also refuses queries, once the runtime has ended or is about to; else None."""
        self.n_restarts = 0
        """How often another runtime has taken the place of one that had died."""
        self.empty_since = 0.0
        """When the runtime's cache was emptied last, in monotonic seconds; 0 if it was not since the start."""
        self.has_disk = False
        """Whether the runtime has a disk tier."""
        self.heard_at = 0.0
        """When its last frame came, in monotonic seconds."""
        self.n_frames = 0
        """Frames received; grows while the runtime is alive."""
        self._n_frames_dropped = 0

    async def connect(self, socket_path: str) -> None:
        """Connects to the runtime behind a Unix socket, instead of the one before. It may bind the socket later.

        Raises:
            ConfigError: the socket's path is too long.
        """
        address = endpoint(socket_path)
        await self._disconnect()
        self._socket = self._context.socket(zmq.DEALER)
        # No high-water mark: a send never blocks or drops. The output of the requests that the runtime admitted is
        # the bound of what can pile up.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._socket.connect(address)

    async def handshake(self) -> Ready:
        """Waits until the runtime has loaded its model. Raises ``WireError`` for another version."""
        assert self._socket is not None, "connect comes first"
        self._send(Hello(version=WIRE_VERSION))
        message = decode_from_runtime((await self._socket.recv_multipart())[0])
        if not isinstance(message, Ready):
            raise WireError(f"the runtime answered the handshake with {type(message).__name__}, not Ready")
        if message.version != WIRE_VERSION:
            raise WireError(
                f"the runtime speaks wire version {message.version} and the frontend {WIRE_VERSION}; "
                "both must come from the same installation"
            )
        self._page_size, self.has_disk = message.page_size, message.has_disk
        self.heard_at = time.monotonic()
        self._receiving = asyncio.create_task(self._receive(self._socket))
        return message

    @property
    def n_in_flight(self) -> int:
        """Requests that have not received their terminal message."""
        return len(self._requests)

    @property
    def runtimes(self) -> tuple[RuntimeClient]:
        """See ``EngineClient.runtimes``."""
        return (self,)

    def submit(
        self,
        prompts: Sequence[Submit],
        *,
        arrived: Arrival,
        streams: bool = True,
        max_in_flight: int | None = None,
    ) -> RequestGroup:
        """See ``EngineClient.submit``."""
        return RequestGroup(self, prompts, arrived, streams, max_in_flight)

    @property
    def misses(self) -> MissCounts:
        """What ended requests did not find in the cache, since the start."""
        return self._misses.total

    def take_recent_misses(self) -> MissCounts:
        """Returns what requests that ended since the last call did not find in the cache."""
        return self._misses.take_recent()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in flight, and no group that has begun will send more."""
        return self._idle.is_set()

    async def idle(self) -> None:
        """Waits until nothing is in flight, and no group that has begun will send more."""
        await self._idle.wait()

    async def flush(self) -> Flushed:
        """Makes every cached prefix unreachable."""
        flushed = await self._query(Flush(id=uuid.uuid4().hex), Flushed)
        self.empty_since = time.monotonic()
        return flushed

    async def invalidate(
        self,
        tokens: bytes,
        namespace: CacheNamespace,
        *,
        all_adapters: bool = False,
        lowest_tier: Tier = "storage",
    ) -> Invalidated:
        """See ``EngineClient.invalidate``."""
        query = Invalidate(uuid.uuid4().hex, tokens, namespace, lowest_tier, all_adapters)
        return await self._query(query, Invalidated)

    async def close_session(self, session_id: str, namespace: CacheNamespace) -> SessionClosed:
        """See ``EngineClient.close_session``."""
        return await self._query(CloseSession(uuid.uuid4().hex, session_id, namespace), SessionClosed)

    async def explain(self, tokens: bytes, namespace: CacheNamespace, *, contents: bool) -> Explained:
        """See ``EngineClient.explain``."""
        return await self._query(Explain(uuid.uuid4().hex, tokens, namespace, contents), Explained)

    async def match(self, prompts: Sequence[bytes], namespace: CacheNamespace) -> Matched:
        """See ``EngineClient.match``."""
        return await self._query(Match(uuid.uuid4().hex, tuple(prompts), namespace), Matched)

    async def stored(self, request: InFlightRequest) -> Stored:
        """See ``RequestSender.stored``."""
        prompt = request.prompt
        query = GetStored(uuid.uuid4().hex, prompt.tokens, prompt.namespace)
        return await self._query(query, Stored)

    async def outline(self, *, contents: bool) -> Outlined:
        """See ``EngineClient.outline``."""
        return await self._query(Outline(uuid.uuid4().hex, contents), Outlined)

    def has_request(self, name: str) -> bool:
        """Returns whether a request in flight has this name, see ``InFlightRequest.has_name``. O(requests)."""
        return any(request.has_name(name) for request in self._requests.values())

    async def tables(self, name: str = "", first: int = 0) -> Tabled:
        """See ``EngineClient.tables``."""
        asked = tuple(request.id for request in self._requests.values() if request.has_name(name)) if name else ()
        if name and not asked:
            raise request_not_found(name)
        shown = asked[:MAX_SHOWN_REQUESTS]
        request_ids = {one.id: one.request_id for one in self._requests.values()}  # some may end meanwhile
        tabled = await self._query(GetTables(uuid.uuid4().hex, shown, first), Tabled)
        if name and not tabled.requests:
            raise request_not_found(name)
        requests = tuple(
            msgspec.structs.replace(one, request_id=request_ids.get(one.id, "")) for one in tabled.requests
        )
        n_more = tabled.n_more + len(asked) - len(shown)
        return msgspec.structs.replace(tabled, requests=requests, n_more=n_more)

    async def pin(self, tokens: bytes, namespace: CacheNamespace, ttl_s: float) -> Pinned:
        """See ``EngineClient.pin``."""
        return await self._query(Pin(uuid.uuid4().hex, tokens, ttl_s, namespace), Pinned)

    async def load_adapter(self, load: str, name: str, path: str, *, is_restarted: bool = False) -> ServedAdapter:
        """Loads an adapter; returns it once requests may ask for it.

        Args:
            load: the load's id, which no other one has.
            name: the adapter's.
            path: its folder.
            is_restarted: whether to ask a runtime that has shaken hands before ``resume``.

        Raises:
            InvalidRequest: it cannot be loaded.
            RequestError: the runtime ends meanwhile, or takes longer than ``LOAD_TIMEOUT_S``: it goes on with the
                load until ``unload_adapter``.
        """
        query = LoadAdapter(load, name, path)
        loaded = await self._query(query, AdapterLoaded, timeout_s=LOAD_TIMEOUT_S, is_restarted=is_restarted)
        return loaded.adapter

    def unload_adapter(self, load: str, *, is_released: bool, is_restarted: bool = False) -> None:
        """Unloads an adapter, see ``UnloadAdapter``. Does nothing if the runtime does not have it, or is down.

        Args:
            load: the load's id.
            is_released: whether no request for it is sent any more.
            is_restarted: whether to tell a runtime that has shaken hands before ``resume``.
        """
        if self._failure is None or is_restarted:
            self._send(UnloadAdapter(load, is_released))

    async def stats(self) -> Stats:
        """Returns the runtime's counters as of now; dropped frames are summed over both processes."""
        stats = await self._query(GetStats(id=uuid.uuid4().hex), Stats)
        n_dropped = stats.frames_dropped_total + self._n_frames_dropped
        cache_use, drafts, pauses = stats.cache_use, stats.drafts, stats.pauses
        if not self._shows_contents:
            cache_use = cache_use.in_whole_pages
            drafts = None if drafts is None else drafts.rounded_down(self._page_size)
            pauses = None if pauses is None else msgspec.structs.replace(pauses, kinds={})  # clients name tools
        return msgspec.structs.replace(
            stats, frames_dropped_total=n_dropped, cache_use=cache_use, drafts=drafts, pauses=pauses
        )

    def fail(self, error: RequestError, refusal: RequestError | None = None) -> None:
        """Ends everything in flight with ``error``; ``refusal``, or the same error, refuses what comes later."""
        self.refusal = self._failure = refusal or error
        for request in self._requests.values():
            self.cancel(request)
            request.fail(error)
        for reply in self._queries.values():
            if not reply.done():
                reply.set_exception(error)
        self._requests.clear()
        self.load = 0.0
        self._note_idle()

    def resume(self) -> None:
        """Accepts requests again, after ``fail``, for the runtime that has shaken hands since."""
        if isinstance(self.refusal, RuntimeRestarting):  # else the server shuts down meanwhile
            self.refusal = None
        self._failure = None
        self.n_restarts += 1
        self.empty_since = time.monotonic()

    def refusal_of(self, *, are_first: bool) -> RequestError | None:
        """Returns the error that refuses the first prompts of a group, or later ones; None if they are accepted."""
        return self.refusal if are_first else self._failure

    async def send_requests(self, requests: Sequence[InFlightRequest], *, are_first: bool) -> None:
        """See ``RequestSender.send_requests``; raises ``refusal_of``."""
        self.send(requests, are_first=are_first)

    def send(self, requests: Sequence[InFlightRequest], *, are_first: bool = True) -> None:
        """Sends all prompts or none; the requests then receive tokens. Raises ``refusal_of``."""
        if (refusal := self.refusal_of(are_first=are_first)) is not None:
            raise refusal.with_traceback(None)
        frames = [(request, _frame(request.prompt)) for request in requests]
        for request, frame in frames:
            self._send_soon(frame)
            self._requests[request.id] = request
            self.load += request.load
            self._idle.clear()

    def expect(self, n_more: int) -> None:
        """See ``RequestSender.expect``."""
        self._n_expected += n_more
        self._note_idle()

    def cancel(self, request: InFlightRequest, choice: int | None = None) -> None:
        """Asks the runtime to end a request, or one choice of it. Does nothing if the request has ended."""
        if request.id in self._requests:
            self._send(Cancel(id=request.id, choice=choice))

    def abandon(self, request: InFlightRequest) -> None:
        """Cancels a request and drops its later output."""
        self.cancel(request)
        self._remove(request.id)

    def begin_pause(self, request: InFlightRequest, tools: Sequence[str]) -> None:
        """See ``RequestSender.begin_pause``."""
        if self._failure is None:
            self._send(BeginPause(uuid.uuid4().hex, request.id, tuple(tools)))

    def end_pause(self, request_id: str) -> None:
        """Tells the runtime that a chat has gone on elsewhere from the answer to a request."""
        if self._failure is None:
            self._send(EndPause(uuid.uuid4().hex, request_id))

    def drain(self) -> None:
        """Asks the runtime to end once it is idle."""
        self._send(Drain())

    async def close(self) -> None:
        """Fails everything in flight, then ends the receiving task and closes the socket."""
        self.fail(self._failure or Draining("the server shut down before the answer was complete"))
        await self._disconnect()
        self._context.term()

    async def _disconnect(self) -> None:
        """Ends the receiving task and closes the socket, if there are any."""
        if self._receiving is not None:
            self._receiving.cancel()
            await asyncio.gather(self._receiving, return_exceptions=True)
            self._receiving = None
        self._flush_outgoing()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def _query(
        self,
        query: CacheCommand | LoadAdapter | GetTables | GetStats,
        kind: type[ReplyT],
        *,
        timeout_s: float | None = None,
        is_restarted: bool = False,
    ) -> ReplyT:
        """Sends a query and returns its reply.

        Args:
            query: the message.
            kind: class of the reply.
            timeout_s: the longest wait; None: ``query_timeout_s``.
            is_restarted: whether to ask a runtime that has shaken hands before ``resume``.

        Raises:
            RequestError: the runtime refuses the query.
            RuntimeSilent: there is no reply in time.
        """
        limit_s = self._query_timeout_s if timeout_s is None else timeout_s
        if self._failure is not None and not is_restarted:
            raise self._failure.with_traceback(None)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._queries[query.id] = future
        try:
            self._send(query)
            async with asyncio.timeout(limit_s):
                reply = await future
        except TimeoutError:
            raise RuntimeSilent(f"the runtime did not answer within {limit_s:.0f} s; try again") from None
        finally:
            del self._queries[query.id]
        if not isinstance(reply, kind):
            raise WireError(f"the runtime answered {type(query).__name__} with {type(reply).__name__}")
        return reply

    def _send(self, message: ToRuntime) -> None:
        self._send_soon(_frame(message))

    def _send_soon(self, frame: bytes) -> None:
        """Sends a frame together with the others of this turn: each first frame wakes ZeroMQ's thread."""
        self._outgoing.append(frame)
        if len(self._outgoing) == 1:
            asyncio.get_running_loop().call_soon(self._flush_outgoing)

    def _flush_outgoing(self) -> None:
        frames, self._outgoing = self._outgoing, []
        for frame in frames:
            assert self._socket is not None, "connect comes first"
            self._socket.send(frame, zmq.NOBLOCK)

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            n_bytes = 0
            while n_bytes < MAX_BYTES_PER_TURN:
                # Frames that have already arrived need no turn of the loop and are applied before any reader wakes.
                # So a request's last tokens and its end form one delta, as does the backlog of a slow reader.
                arriving = asyncio.ensure_future(socket.recv_multipart())
                if not arriving.done():
                    self._wake_readers()
                frames = await arriving
                n_bytes += sum(map(len, frames))
                self.n_frames += len(frames)
                self.heard_at = time.monotonic()
                for frame in frames:
                    self._apply(frame)
            self._wake_readers()
            await asyncio.sleep(0)

    def _apply(self, frame: bytes) -> None:
        try:
            message = decode_from_runtime(frame)
        except WireError:
            self._n_frames_dropped += 1
            return
        match message:
            case Tokens():
                for computed in message.computed:
                    if (request := self._requests.get(computed.id)) is not None:
                        request.add_computed(computed if self._shows_contents else without_copies(computed))
                for logprobs in message.prompt_logprobs:
                    if (request := self._receiver(logprobs.id)) is not None:
                        request.add_prompt_logprobs(logprobs)
                        self._woken[request.wake] = None
                for item in message.items:
                    if (request := self._receiver(item.id)) is not None:
                        request.add_tokens(item, self.metrics, self.heard_at)
                        if item.finish_reason is not None or not request.may_wait:
                            self._woken[request.wake] = None
            case Done():
                if not self._shows_contents:
                    message = without_contents(message)
                request = self._remove(message.id)
                if request is None or not request.prompt.is_canary:
                    self._misses.add(message)
                if request is not None:
                    request.end(message, self.metrics)
                    self._woken[request.wake] = None
            case Failed() if (query := self._queries.get(message.id)) is not None:
                if not query.done():
                    query.set_exception(request_error(message.code, message.text, param=message.param))
            case Failed():
                error = request_error(message.code, message.text, param=message.param)
                request = self._remove(message.id)
                if request is not None and not (isinstance(error, QueueFull) and self.send_elsewhere(request)):
                    request.fail(error)
            case Heartbeat() | Ready():
                pass
            case _:
                reply = self._queries.get(message.id)
                if reply is not None and not reply.done():
                    reply.set_result(message)

    def _wake_readers(self) -> None:
        """Gives the readers what has arrived."""
        woken, self._woken = list(self._woken), {}
        for start in range(0, len(woken), READERS_PER_BURST):
            for wake in [wake for wake in woken[start : start + READERS_PER_BURST] if wake.take()]:
                wake.write()

    def _receiver(self, request_id: str) -> InFlightRequest | None:
        """Returns the request that a message is for; None if it was abandoned or its reader is too slow."""
        request = self._requests.get(request_id)
        if request is None or not request.streams or request.n_pending_bytes <= self._max_pending_bytes:
            return request
        self.abandon(request)
        request.fail(ClientTooSlow(f"{request.n_pending_bytes} bytes of the answer waited to be read; read faster"))
        return None

    def _remove(self, request_id: str) -> InFlightRequest | None:
        request = self._requests.pop(request_id, None)
        self.load -= 0.0 if request is None else request.load
        self._note_idle()
        return request

    def _note_idle(self) -> None:
        (self._idle.clear if self._requests or self._n_expected else self._idle.set)()


def _frame(message: ToRuntime) -> bytes:
    """Encodes a message. Raises ``WireError`` if it is too long, because the runtime would drop it."""
    frame = encode(message)
    if len(frame) > MAX_FRAME_BYTES:
        raise WireError(f"a {type(message).__name__} has {len(frame)} bytes; at most {MAX_FRAME_BYTES}")
    return frame
