"""The load generator: sends sessions to an OpenAI-compatible server and times what streams back."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence

from radixkv.bench.load.arrivals import Load
from radixkv.bench.load.chunks import BadReply
from radixkv.bench.load.client import Client
from radixkv.bench.load.garbage_collection import young_collections_only
from radixkv.bench.load.prefetch import Ahead, Opened
from radixkv.bench.load.progress import View
from radixkv.bench.load.prompt_encoder import PromptEncoder
from radixkv.bench.load.record import Measurement, Record
from radixkv.bench.load.request_body import Post, Wording
from radixkv.bench.session import Reply, Request, Session, Turns
from radixkv.errors import RadixKVError
from radixkv.terminal_progress import Progress

LOST = ("connect", "disconnect")
"""Kinds of errors after which the server may be gone."""
BROKEN = ("http_500", "http_503", "server")
"""Kinds of errors after which it may still answer, but no longer serve."""


class ServerGone(RadixKVError):
    """Nothing takes connections where the server was, or nothing comes from it."""


class RunInterrupted(asyncio.CancelledError):
    """The task that awaits a run was cancelled; ``measurement`` has what there was by then."""

    def __init__(self, measurement: Measurement) -> None:
        super().__init__()
        self.measurement = measurement


class LoadGenerator:
    """Sends sessions to one server.

    Args:
        client: of that server; open while sessions are sent.
        encoder: makes token ids of every prompt; None: prompts are sent as they are.
    """

    def __init__(self, client: Client, encoder: PromptEncoder | None = None) -> None:
        self._client = client
        self._encoder = encoder

    async def run(self, sessions: Sequence[Session], load: Load, progress: Progress | None = None) -> Measurement:
        """Sends every turn of every session and waits for all answers.

        The requests of a turn are sent together, when the answers to the turn before are there. A request that
        fails says so in its record, and ends its session. If the server goes away, or answers nobody while a
        request waits in vain, the run ends with what there is: the measurement says that it was ``aborted``, and
        why.

        In an open loop a request's latency counts from when it should have been sent: a session's first turn from
        its arrival, a later one from the answers to the turn before. Neither a late client nor waiting for room
        makes it shorter.

        Raises:
            RunInterrupted: the task was cancelled.
            CheckpointError: there are chats to encode, and no chat template.
        """
        wording = Wording(load.model, self._encoder, load.has_extensions)
        return await _Run(self._client, wording, sessions, load, View(progress)).measured()


class _Run:
    def __init__(
        self, client: Client, wording: Wording, sessions: Sequence[Session], load: Load, view: View
    ) -> None:
        self._client = client
        self._wording = wording
        self._sessions = sessions
        self._view = view
        self._arrivals = load.arrivals(sessions)
        most = load.max_concurrency or max(1, sum(session.n_requests for session in sessions))
        self._room = asyncio.Semaphore(most)
        self._clients = asyncio.Semaphore(most)
        """Of a closed loop: each has one session. An open loop takes none."""
        self._probing = asyncio.Lock()
        self._records: list[list[Record]] = [[] for _ in sessions]
        self._ended = 0.0
        """When the last request was over,"""
        self._answered = 0.0
        """and when the last was answered."""

    async def measured(self) -> Measurement:
        arrivals = self._arrivals or [0.0] * len(self._sessions)
        order = sorted(range(len(self._sessions)), key=arrivals.__getitem__)
        ahead = Ahead([self._sessions[place] for place in order], self._wording)
        aborted: str | None = None
        begun = self._ended = self._answered = time.perf_counter()
        watch = asyncio.create_task(self._view.watch())
        try:
            await ahead.fill()
            with young_collections_only():
                begun = self._ended = self._answered = time.perf_counter()
                async with asyncio.TaskGroup() as tasks:
                    for place in order:
                        await self._begin(tasks, ahead, place, begun + arrivals[place])
        except ExceptionGroup as group:
            if not isinstance(group.exceptions[0], ServerGone):
                raise group.exceptions[0] from None
            aborted = str(group.exceptions[0])
        except asyncio.CancelledError:
            raise RunInterrupted(self._measurement(begun, "it was interrupted")) from None
        finally:
            watch.cancel()
            ahead.close()
        return self._measurement(begun, aborted)

    async def _begin(self, tasks: asyncio.TaskGroup, ahead: Ahead, place: int, due: float) -> None:
        """Begins the next session when it is due, or when a client is free for it."""
        is_open = self._arrivals is not None
        await (_until(due) if is_open else self._clients.acquire())
        tasks.create_task(self._session(place, ahead.take(), due if is_open else None))
        await asyncio.sleep(0)  # it sends
        ahead.refill()

    async def _session(self, place: int, opened: Opened, due: float | None) -> None:
        posts = opened.posts
        try:
            for turn in itertools.count():
                records = [Record(session=place, turn=turn, scheduled=due) for _ in posts]
                self._records[place] += records  # before they are answered: the run may end meanwhile
                await self._ask_all(posts, records)
                due = None if due is None else time.perf_counter()  # making the next turn counts
                if any(record.error is not None for record in records):
                    return await self._look_for_the_server(records)
                requests = _next_turn(opened.turns, [Reply(record.texts) for record in records])
                if requests is None:
                    return None
                posts = await self._posts(requests)
        finally:
            opened.turns.close()
            if self._arrivals is None:
                self._clients.release()

    async def _ask_all(self, posts: Sequence[Post], records: Sequence[Record]) -> None:
        if len(posts) == 1:
            await self._ask(posts[0], records[0])  # not in a task of its own, which would begin later
        else:
            await asyncio.gather(*map(self._ask, posts, records))

    async def _posts(self, requests: Sequence[Request]) -> list[Post]:
        if self._wording.encoder is None:
            return self._wording.posts(requests)
        # In a thread, so that the event loop goes on stamping what other requests are answered.
        return await asyncio.to_thread(self._wording.posts, requests)

    async def _ask(self, post: Post, record: Record) -> None:
        try:
            if post.error is not None:
                raise BadReply("prompt", post.error)
            async with self._room:
                with self._view.in_flight():
                    await self._client.ask(post.path, post.body, record, n_choices=post.request.n)
            is_right = post.request.is_right
            record.is_right = None if is_right is None else is_right(record.texts)
        except BadReply as error:
            record.error, record.error_kind = str(error), error.kind
        except asyncio.CancelledError:
            record.error = "the run ended before its answer was there"
            record.error_kind = "stopped" if record.started else "not_sent"
            raise
        self._ended = time.perf_counter()
        if record.error is None:
            self._answered = self._ended
        self._view.done(record)

    async def _look_for_the_server(self, records: Sequence[Record]) -> None:
        """Raises ``ServerGone`` if that is why they failed."""
        in_vain = [record for record in records if record.error_kind == "timeout"]
        if in_vain and self._client.is_silent_since(max(record.started for record in in_vain)):
            # The others in flight, and all that follow, would wait as long.
            raise ServerGone(f"the server at {self._client.address} answers nobody: {in_vain[0].error}")
        lost = [record.error for record in records if record.error_kind in LOST]
        if lost:
            async with self._probing:
                if not await self._client.is_there():
                    raise ServerGone(f"the server at {self._client.address} is gone: {lost[0]}")
        broken = [record.error for record in records if record.error_kind in BROKEN]
        if broken and await self._client.is_dying():
            raise ServerGone(f"the server at {self._client.address} cannot serve any more: {broken[0]}")

    def _measurement(self, begun: float, aborted: str | None) -> Measurement:
        self._read_prompts()
        self._note_what_was_not_sent(aborted is not None)
        records = list(itertools.chain.from_iterable(self._records))
        # Waiting in vain for a server that is gone or hangs is no part of what was done.
        ended = self._ended if aborted is None else self._answered
        return Measurement(records, max(ended - begun, 1e-9), begun, aborted)

    def _read_prompts(self) -> None:
        for record in itertools.chain.from_iterable(self._records):
            try:
                record.read_prompt()
            except BadReply as error:
                if record.error is None:
                    record.error, record.error_kind = str(error), error.kind

    def _note_what_was_not_sent(self, is_aborted: bool) -> None:
        reason = "the run ended before" if is_aborted else "the turn before it failed"
        for place, (session, records) in enumerate(zip(self._sessions, self._records, strict=True)):
            turn = records[-1].turn + 1 if records else 0
            is_cut = is_aborted or any(record.error is not None for record in records)
            records += [
                Record(session=place, turn=turn, error=f"not sent: {reason}", error_kind="not_sent")
                for _ in range(session.n_requests - len(records) if is_cut else 0)
            ]


def _next_turn(turns: Turns, replies: Sequence[Reply]) -> Sequence[Request] | None:
    """None: there is none."""
    try:
        return turns.send(replies)
    except StopIteration:
        return None


async def _until(due: float) -> None:
    while (remaining := due - time.perf_counter()) > 0:
        await asyncio.sleep(remaining)
