"""Load generator that sends sessions to an OpenAI-compatible server and times the streamed answers."""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from radixkv.client.errors import BadReply
from radixkv.errors import RadixKVError
from radixkv.lab.bench.load.arrivals import Load
from radixkv.lab.bench.load.client import OpenAIClient
from radixkv.lab.bench.load.record import Measurement, Record
from radixkv.lab.bench.load.requests import (
    PreparedRequest,
    PreparedSession,
    PromptEncoder,
    RequestBuilder,
    SessionPrefetcher,
)
from radixkv.lab.bench.session import BenchRequest, Reply, Session, Turns
from radixkv.terminal import Progress

NEVER = 1 << 30
"""A threshold of the garbage collector that is not reached."""
CONNECTION_ERRORS = ("connect", "disconnect")
"""Values of ``error_kind`` after which the server may be gone."""
SERVER_ERRORS = ("http_500", "http_503", "server")
"""Values of ``error_kind`` after which the server may be up but unable to serve."""


class ServerGone(RadixKVError):
    """The server accepts no connections, has stopped answering, or reports that it cannot serve."""


class RunInterrupted(asyncio.CancelledError):
    """The task that awaits a run was cancelled.

    Args:
        measurement: the records until then.
    """

    def __init__(self, measurement: Measurement) -> None:
        super().__init__()
        self.measurement = measurement


class LoadGenerator:
    """Sends sessions to one server.

    Args:
        client: the server's client; must be open while sessions are sent.
        encoder: encodes prompts to token ids. None: prompts are sent as they are.
    """

    def __init__(self, client: OpenAIClient, encoder: PromptEncoder | None = None) -> None:
        self._client = client
        self._encoder = encoder

    async def run(self, sessions: Sequence[Session], load: Load, progress: Progress | None = None) -> Measurement:
        """Sends every turn of every session and waits for all answers.

        The requests of a turn are sent together, after the answers to the previous turn. A failed request has the
        error in its record and ends its session. If the server goes away, or sends nothing to any request until a
        request times out, the run ends early and ``Measurement.aborted`` has the reason.

        In an open loop a request's latency counts from when it should have been sent: a session's first turn from
        the session's arrival, a later turn from the answers to the previous one. So latencies include the client's
        own delays and the wait for ``max_concurrency``.

        Raises:
            RunInterrupted: the task was cancelled.
            CheckpointError: a chat is to be encoded, and there is no chat template.
            ConfigError: a request with tools is to be encoded.
        """
        builder = RequestBuilder(load.model, self._encoder, load.has_extensions)
        counts = _RequestProgress(progress, sum(session.n_requests for session in sessions))
        return await _Run(self._client, builder, sessions, load, counts).measure()


class _RequestProgress:
    """Counts a run's requests and tokens.

    Args:
        progress: shows the counts. None: they are not shown.
        n_requests: number of requests in the run.
    """

    def __init__(self, progress: Progress | None, n_requests: int) -> None:
        self._progress = progress
        self._n_requests = n_requests
        self._n_done = self._n_in_flight = self._n_failed = 0
        self._n_output = self._n_prompt = self._n_cached = 0

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        """Context that counts a request as in flight."""
        self._n_in_flight += 1
        self._show()
        try:
            yield
        finally:
            self._n_in_flight -= 1

    def done(self, record: Record) -> None:
        """Counts a request that was answered or failed."""
        self._n_done += 1
        self._n_failed += record.error is not None
        self._n_output += record.n_output_tokens
        self._n_prompt += record.n_prompt_tokens
        self._n_cached += record.n_cached_tokens or 0
        self._show()

    def _show(self) -> None:
        if self._progress is None:
            return
        share = f", {100 * self._n_cached / self._n_prompt:.0f}% cached" if self._n_prompt else ""
        failed = f", {self._n_failed} failed" if self._n_failed else ""
        self._progress.show(
            f"{self._n_done}/{self._n_requests}, {self._n_in_flight} in flight{share}{failed}, "
            f"{self._n_output} new tokens",
            self._n_output,
        )


class _Run:
    def __init__(
        self,
        client: OpenAIClient,
        builder: RequestBuilder,
        sessions: Sequence[Session],
        load: Load,
        progress: _RequestProgress,
    ) -> None:
        self._client = client
        self._builder = builder
        self._sessions = sessions
        self._progress = progress
        self._arrivals = load.arrivals(sessions)
        max_concurrency = load.max_concurrency or max(1, sum(session.n_requests for session in sessions))
        self._request_slots = asyncio.Semaphore(max_concurrency)
        self._session_slots = asyncio.Semaphore(max_concurrency)
        """The clients of a closed loop, each of which runs one session; an open loop does not use them."""
        self._probe_lock = asyncio.Lock()
        self._records: list[list[Record]] = [[] for _ in sessions]
        self._last_end = 0.0
        """When the last request succeeded or failed."""
        self._last_success = 0.0
        """When the last request succeeded."""

    async def measure(self) -> Measurement:
        arrivals = self._arrivals or [0.0] * len(self._sessions)
        order = sorted(range(len(self._sessions)), key=arrivals.__getitem__)
        prefetcher = SessionPrefetcher([self._sessions[index] for index in order], self._builder)
        aborted: str | None = None
        start = self._last_end = self._last_success = time.perf_counter()
        try:
            await prefetcher.fill()
            with _young_collections_only():
                start = self._last_end = self._last_success = time.perf_counter()
                async with asyncio.TaskGroup() as tasks:
                    for index in order:
                        await self._start_session(tasks, prefetcher, index, start + arrivals[index])
        except ExceptionGroup as group:
            if not isinstance(group.exceptions[0], ServerGone):
                raise group.exceptions[0] from None
            aborted = str(group.exceptions[0])
        except asyncio.CancelledError:
            raise RunInterrupted(self._measurement(start, "it was interrupted")) from None
        finally:
            prefetcher.close()
        return self._measurement(start, aborted)

    async def _start_session(
        self, tasks: asyncio.TaskGroup, prefetcher: SessionPrefetcher, index: int, due: float
    ) -> None:
        """Starts the next session when it is due (open loop) or when a client is free (closed loop)."""
        is_open = self._arrivals is not None
        await (_sleep_until(due) if is_open else self._session_slots.acquire())
        tasks.create_task(self._run_session(index, prefetcher.take(), due if is_open else None))
        await asyncio.sleep(0)  # lets the session send its requests before the next one is prepared
        prefetcher.refill()

    async def _run_session(self, index: int, session: PreparedSession, due: float | None) -> None:
        prepared = session.requests
        try:
            for turn in itertools.count(self._sessions[index].first_turn):
                records = [Record(session=index, turn=turn, scheduled=due) for _ in prepared]
                self._records[index] += records  # before they are answered, since the run may end meanwhile
                await self._send_all(prepared, records)
                answered_at = time.perf_counter()
                if any(record.error is not None for record in records):
                    return await self._check_server(records)
                requests = _next_turn(session.turns, [record.reply for record in records])
                if requests is None:
                    return None
                prepared = await self._prepare(requests)
                sent_at = answered_at + max(request.after_s for request in requests)
                await _sleep_until(sent_at)
                due = None if due is None else sent_at  # latencies include building the turn
        finally:
            session.turns.close()
            if self._arrivals is None:
                self._session_slots.release()

    async def _send_all(self, requests: Sequence[PreparedRequest], records: Sequence[Record]) -> None:
        if len(requests) == 1:
            await self._send(requests[0], records[0])  # without a task of its own, which would start later
        else:
            await asyncio.gather(*map(self._send, requests, records))

    async def _prepare(self, requests: Sequence[BenchRequest]) -> list[PreparedRequest]:
        if self._builder.encoder is None:
            return self._builder.build(requests)
        # Encoding in a thread, so that the event loop keeps taking time stamps of other answers.
        return await asyncio.to_thread(self._builder.build, requests)

    async def _send(self, prepared: PreparedRequest, record: Record) -> None:
        try:
            if prepared.error is not None:
                raise BadReply("prompt", prepared.error)
            async with self._request_slots:
                with self._progress.in_flight():
                    await self._client.send(prepared.path, prepared.body, record, n_choices=prepared.request.n)
            check = prepared.request.check
            record.is_correct = None if check is None else check(record.reply)
        except BadReply as error:
            record.error, record.error_kind = str(error), error.kind
        except asyncio.CancelledError:
            record.error = "the run ended before the answer was complete"
            record.error_kind = "stopped" if record.started else "not_sent"
            raise
        self._last_end = time.perf_counter()
        if record.error is None:
            self._last_success = self._last_end
        self._progress.done(record)

    async def _check_server(self, records: Sequence[Record]) -> None:
        """Raises ``ServerGone`` if the requests failed because the server is gone or cannot serve."""
        timed_out = [record for record in records if record.error_kind == "timeout"]
        if timed_out and self._client.is_silent_since(max(record.started for record in timed_out)):
            # Every other request would time out as well.
            raise ServerGone(f"the server at {self._client.address} has stopped answering: {timed_out[0].error}")
        lost = [record.error for record in records if record.error_kind in CONNECTION_ERRORS]
        if lost:
            async with self._probe_lock:
                if not await self._client.is_reachable():
                    raise ServerGone(f"the server at {self._client.address} is gone: {lost[0]}")
        failed = [record.error for record in records if record.error_kind in SERVER_ERRORS]
        if failed and await self._client.is_unhealthy():
            raise ServerGone(f"the server at {self._client.address} can no longer serve: {failed[0]}")

    def _measurement(self, start: float, aborted: str | None) -> Measurement:
        self._decode_prompts()
        self._add_unsent_records(aborted is not None)
        records = list(itertools.chain.from_iterable(self._records))
        # The duration excludes the wait for a server that is gone or hangs.
        end = self._last_end if aborted is None else self._last_success
        return Measurement(records, max(end - start, 1e-9), start, aborted)

    def _decode_prompts(self) -> None:
        for record in itertools.chain.from_iterable(self._records):
            try:
                record.decode_prompt_token_ids()
            except BadReply as error:
                if record.error is None:
                    record.error, record.error_kind = str(error), error.kind

    def _add_unsent_records(self, is_aborted: bool) -> None:
        """Adds a failed record for every request that was not sent."""
        reason = "the run ended before" if is_aborted else "an earlier turn of its session failed"
        for index, (session, records) in enumerate(zip(self._sessions, self._records, strict=True)):
            turn = records[-1].turn + 1 if records else session.first_turn
            is_cut_short = is_aborted or any(record.error is not None for record in records)
            records += [
                Record(session=index, turn=turn, error=f"not sent: {reason}", error_kind="not_sent")
                for _ in range(session.n_requests - len(records) if is_cut_short else 0)
            ]


def _next_turn(turns: Turns, replies: Sequence[Reply]) -> Sequence[BenchRequest] | None:
    """Returns the requests of the next turn; None: the session has ended."""
    try:
        return turns.send(replies)
    except StopIteration:
        return None


async def _sleep_until(due: float) -> None:
    while (remaining := due - time.perf_counter()) > 0:
        await asyncio.sleep(remaining)


@contextmanager
def _young_collections_only() -> Iterator[None]:
    """Context in which existing objects and the oldest generation are not collected.

    A full collection takes tens of milliseconds in a process that has imported this package, and no time stamps are
    taken meanwhile. Objects stay frozen afterwards if some were before.
    """
    first, second, third = gc.get_threshold()
    n_frozen = gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    gc.set_threshold(first, second, NEVER)
    try:
        yield
    finally:
        gc.set_threshold(first, second, third)
        if not n_frozen:
            gc.unfreeze()
