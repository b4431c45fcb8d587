from __future__ import annotations

import asyncio
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from radixkv.errors import InvalidRequest, WireError
from radixkv.frontend.arrival import Arrival
from radixkv.frontend.http.errors import ClientTooSlow, RuntimeSilent
from radixkv.frontend.in_flight import TokenDelta
from radixkv.frontend.process import SLOW_READER_TIMEOUT_MS, open_listener
from radixkv.frontend.request_group import RequestGroup
from radixkv.frontend.runtime_client import RuntimeClient
from radixkv.runtime.process import RuntimeServer
from radixkv.wire.cache_messages import Invalidate
from radixkv.wire.cache_use import CacheUse
from radixkv.wire.messages import (
    MAX_FRAME_BYTES,
    Done,
    Failed,
    FromRuntime,
    NewTokens,
    Submit,
    Tokens,
    ToRuntime,
    encode,
    pack_tokens,
    unpack_tokens,
)
from radixkv.wire.namespace import CacheNamespace
from radixkv.wire.sampling import SamplingParams
from radixkv.wire.stats import DraftStats, SourceStats, Stats
from support.live import LIMIT_S
from support.scripted_runtime import DRAFTS, PAUSES, ScriptedLoop
from support.threaded_runtime import run


def prompt(n: int) -> Submit:
    return Submit(uuid.uuid4().hex, pack_tokens([1, 2, 3]), SamplingParams(max_tokens=n))


async def gather(client: RuntimeClient, prompts: list[Submit]) -> list[TokenDelta]:
    async with client.submit(prompts, arrived=Arrival(0.0)) as group:
        return [delta async for delta in group.deltas()]


def test_unread_output_is_merged_into_one_delta(tmp_path: Path) -> None:
    async def test(client: RuntimeClient, server: RuntimeServer) -> None:
        async with client.submit([prompt(50)], arrived=Arrival(0.0)) as group:
            await client.idle()
            deltas = [delta async for delta in group.deltas()]
        assert len(deltas) == 1
        assert len(deltas[0].tokens) == 50 * 4
        assert deltas[0].done is not None

    run(tmp_path, ScriptedLoop(), test)


class ScriptedReader:
    """Takes a group's output in place of the task that waits for it, or fails."""

    def __init__(self, group: RequestGroup, error: Exception | None = None) -> None:
        self.written: list[int] = []
        self.is_full = False
        self._group = group
        self._error = error
        self._taken: list[TokenDelta] = []

    def take(self) -> bool:
        if self._error is not None:
            raise self._error
        if self.is_full or (deltas := self._group.take_quick()) is None:
            return False
        self._taken += deltas
        return True

    def write(self) -> None:
        for delta in self._taken:
            self.written += unpack_tokens(delta.tokens)
        self._taken.clear()


def test_a_direct_reader_takes_what_arrives_while_the_task_waits(tmp_path: Path) -> None:
    async def test(client: RuntimeClient, server: RuntimeServer) -> None:
        async with client.submit([prompt(12)], arrived=Arrival(0.0)) as group:
            reader = group.wake.reader = ScriptedReader(group)
            seen: list[int] = []
            async for delta in group.deltas():
                seen += unpack_tokens(delta.tokens)
                assert delta.done is not None, "the task takes only the end"
        assert reader.written + seen == [1, 2, 3] * 4

    run(tmp_path, ScriptedLoop(step_s=0.005), test)


def test_the_task_takes_what_a_full_reader_leaves(tmp_path: Path) -> None:
    async def test(client: RuntimeClient, server: RuntimeServer) -> None:
        async with client.submit([prompt(12)], arrived=Arrival(0.0)) as group:
            reader = group.wake.reader = ScriptedReader(group)
            order: list[int] = []
            async for delta in group.deltas():
                order += reader.written + unpack_tokens(delta.tokens)
                reader.written.clear()
                reader.is_full = not reader.is_full
        assert order == [1, 2, 3] * 4

    run(tmp_path, ScriptedLoop(step_s=0.005), test)


def test_an_error_of_a_direct_reader_ends_its_own_request_only(tmp_path: Path) -> None:
    async def test(client: RuntimeClient, server: RuntimeServer) -> None:
        beside = asyncio.create_task(gather(client, [prompt(12)]))
        async with client.submit([prompt(12)], arrived=Arrival(0.0)) as group:
            group.wake.reader = ScriptedReader(group, InvalidRequest("this cannot be rendered"))
            with pytest.raises(InvalidRequest, match="cannot be rendered"):
                async for _ in group.deltas():
                    pass
        assert sum(len(delta.tokens) for delta in await beside) == 12 * 4

    run(tmp_path, ScriptedLoop(step_s=0.005), test)


class CopiesPartialPages(ScriptedLoop):
    """Reports that each prompt has 7 cached tokens, of which 3 were copied from a part of a page."""

    def turn(self) -> list[FromRuntime]:
        return [self._copied(message) for message in super().turn()]

    def receive(self, message: ToRuntime) -> list[FromRuntime]:
        return [self._copied(answer) for answer in super().receive(message)]

    @staticmethod
    def _copied(message: FromRuntime) -> FromRuntime:
        if isinstance(message, Done):
            return replace(message, cache_use=CacheUse(7, 3))
        if isinstance(message, Tokens):
            computed = [replace(each, cache_use=CacheUse(7, 3)) for each in message.computed]
            return replace(message, computed=computed)
        if isinstance(message, Stats):
            return replace(message, cache_use=CacheUse(70, 30))
        return message


@pytest.mark.parametrize(("shows_contents", "n_cached"), [(True, 7), (False, 4)])
def test_parts_of_pages_are_counted_only_if_clients_may_know(
    tmp_path: Path, shows_contents: bool, n_cached: int
) -> None:
    async def test(client: RuntimeClient, server: RuntimeServer) -> None:
        deltas = await gather(client, [prompt(1)])
        done = deltas[-1].done
        assert done is not None
        assert done.cache_use.n_cached == n_cached
        (computed,) = [delta.computed for delta in deltas if delta.computed is not None]
        assert (computed.cache_use.n_cached, computed.cache_use.n_copied) == (n_cached, n_cached - 4)
        stats = await client.stats()
        assert stats.cache_use.n_cached == 10 * n_cached
        assert done.cache_use.n_copied == stats.cache_use.n_copied / 10 == n_cached - 4

    run(tmp_path, CopiesPartialPages(), test, shows_contents=shows_contents)


@pytest.mark.parametrize(
    ("shows_contents", "expected"),
    [
        (True, DRAFTS),
        (
            False,
            DraftStats(0, 48, 16, 9, {"prompt": SourceStats(32, 16), "answers": SourceStats(16, 0)}, (0, 0, 0, 0)),
        ),
    ],
)
def test_drafts_are_counted_to_the_token_only_if_clients_may_know(
    tmp_path: Path, shows_contents: bool, expected: DraftStats
) -> None:
    async def test(client: RuntimeClient, server: RuntimeServer) -> None:
        assert (await client.stats()).drafts == expected

    run(tmp_path, ScriptedLoop(drafts=DRAFTS), test, shows_contents=shows_contents)


def test_no_drafts_are_counted_where_they_are_off(tmp_path: Path) -> None:
    async def test(client: RuntimeClient, server: RuntimeServer) -> None:
        assert (await client.stats()).drafts is None

    run(tmp_path, ScriptedLoop(), test, shows_contents=False)


def test_a_reader_that_is_too_slow_gets_an_error(tmp_path: Path) -> None:
    loop = ScriptedLoop()

    async def test(client: RuntimeClient, server: RuntimeServer) -> None:
        async with client.submit([prompt(400)], arrived=Arrival(0.0)) as group:
            await client.idle()
            with pytest.raises(ClientTooSlow, match="44 bytes"):
                await anext(group.deltas())
        while not loop.cancelled:
            await asyncio.sleep(0.01)

    run(tmp_path, loop, test, max_pending_bytes=40)


def test_logprobs_count_towards_the_unread_output(tmp_path: Path) -> None:
    requested = Submit(uuid.uuid4().hex, pack_tokens([1, 2, 3] * 8), SamplingParams(max_tokens=60, logprobs=20))

    async def test(client: RuntimeClient, server: RuntimeServer) -> None:
        async with client.submit([requested], arrived=Arrival(0.0)) as group:
            await client.idle()
            with pytest.raises(ClientTooSlow):
                await anext(group.deltas())

    loop = ScriptedLoop()
    run(tmp_path, loop, test, max_pending_bytes=1000)
    assert loop.running == {}


@pytest.mark.parametrize(
    ("streams", "sampling"),
    [
        (True, SamplingParams(max_tokens=1, prompt_logprobs=20)),
        (False, SamplingParams(max_tokens=60, logprobs=20, prompt_logprobs=20)),
    ],
    ids=["prompt logprobs", "whole response"],
)
def test_output_that_no_reader_could_have_read_earlier_is_not_limited(
    tmp_path: Path, streams: bool, sampling: SamplingParams
) -> None:
    requested = Submit(uuid.uuid4().hex, pack_tokens([1, 2, 3] * 8), sampling)

    async def test(client: RuntimeClient, server: RuntimeServer) -> None:
        async with client.submit([requested], arrived=Arrival(0.0), streams=streams) as group:
            await client.idle()
            (delta,) = [delta async for delta in group.deltas()]
        assert (len(delta.prompt_logprobs), len(delta.tokens) // 4) == (23, sampling.max_tokens)

    run(tmp_path, ScriptedLoop(), test, max_pending_bytes=100)


class WaitsForCancel(ScriptedLoop):
    """Stops at the sixth token of a choice until a request or choice is cancelled."""

    def turn(self) -> list[FromRuntime]:
        if not self.cancelled and any(choice.n >= 6 for one in self.running.values() for choice in one.choices):
            time.sleep(0.001)
            return []
        return super().turn()


def test_one_choice_can_be_ended_while_the_other_continues(tmp_path: Path) -> None:
    loop = WaitsForCancel()

    async def test(client: RuntimeClient, server: RuntimeServer) -> None:
        requested = Submit(uuid.uuid4().hex, pack_tokens([1, 2, 3]), SamplingParams(max_tokens=30, n=2), priority=5)
        tokens = {0: b"", 1: b""}
        reasons = {}
        async with client.submit([prompt(3), requested], arrived=Arrival(0.0)) as group:
            async for delta in group.deltas():
                if delta.prompt == 0:
                    continue
                tokens[delta.choice] += delta.tokens
                if delta.finish_reason is not None:
                    reasons[delta.choice] = delta.finish_reason
                if len(reasons) == 0 and delta.choice == 0 and len(tokens[0]) >= 8:
                    group.end_choice(delta, "stop")
                last = delta
        assert reasons == {0: "abort", 1: "length"}
        assert tokens[1] == pack_tokens([2, 3, 1] * 10)
        assert len(tokens[0]) < 4 * 30
        assert last.done is not None
        assert last.done.n_output_tokens == 30 + len(tokens[0]) // 4
        assert loop.submitted[1].priority == 5

    run(tmp_path, loop, test)


def test_prompt_logprobs_come_in_order_before_the_first_token(tmp_path: Path) -> None:
    async def test(client: RuntimeClient, server: RuntimeServer) -> None:
        sampling = SamplingParams(max_tokens=2, n=2, prompt_logprobs=1, logprobs=0)
        deltas = await gather(client, [Submit(uuid.uuid4().hex, pack_tokens(list(range(10, 20))), sampling)])
        top_ids = [unpack_tokens(logprobs.top_ids) for delta in deltas for logprobs in delta.prompt_logprobs]
        assert top_ids == [[token + 1] for token in range(11, 20)]
        first = next(index for index, delta in enumerate(deltas) if delta.tokens)
        assert not any(delta.prompt_logprobs for delta in deltas[first + 1 :])
        assert all(len(delta.logprobs) == len(delta.tokens) // 4 for delta in deltas)

    run(tmp_path, ScriptedLoop(), test)


def test_explain_returns_the_reply_of_the_runtime(tmp_path: Path) -> None:
    async def test(client: RuntimeClient, server: RuntimeServer) -> None:
        explained = await client.explain(pack_tokens([1, 2, 3, 4]), CacheNamespace(), contents=True)
        assert (explained.n_tokens, explained.n_cached, explained.reason) == (4, 2, "never_seen")

    run(tmp_path, ScriptedLoop(), test)


def test_a_query_that_the_runtime_refuses_raises_its_error(tmp_path: Path) -> None:
    class RefusingLoop(ScriptedLoop):
        def receive(self, message: Any) -> list[FromRuntime]:
            if isinstance(message, Invalidate):
                return [Failed(message.id, "invalid_request", "too short", "prompt")]
            return super().receive(message)

    async def test(client: RuntimeClient, server: RuntimeServer) -> None:
        with pytest.raises(InvalidRequest, match="too short") as raised:
            await client.invalidate(pack_tokens([1]), CacheNamespace())
        assert raised.value.param == "prompt"

    run(tmp_path, RefusingLoop(), test)


def test_leaving_a_group_cancels_only_unfinished_requests(tmp_path: Path) -> None:
    loop = ScriptedLoop()

    async def test(client: RuntimeClient, server: RuntimeServer) -> None:
        async with client.submit([prompt(1), prompt(100_000)], arrived=Arrival(0.0)) as group:
            async for delta in group.deltas():
                if delta.done is not None:
                    break
        assert client.n_in_flight == 0
        while not loop.cancelled:
            await asyncio.sleep(0.01)
        assert loop.cancelled == [loop.submitted[1].id]

    run(tmp_path, loop, test)


def test_frames_of_unknown_requests_and_garbage_are_dropped(tmp_path: Path) -> None:
    loop = ScriptedLoop()

    async def test(client: RuntimeClient, server: RuntimeServer) -> None:
        receive = loop.receive

        def receive_with_garbage(message: ToRuntime) -> list[FromRuntime]:
            if isinstance(message, Submit):  # in the thread that owns the socket
                server.socket.send_multipart([server.peer, b"garbage"])
                server.socket.send_multipart([server.peer, encode(Tokens([NewTokens("nobody", b"")]))])
            return receive(message)

        loop.receive = receive_with_garbage
        deltas = await gather(client, [prompt(3)])
        assert b"".join(delta.tokens for delta in deltas) == pack_tokens([1, 2, 3])
        assert (await client.stats()).frames_dropped_total == 1

    run(tmp_path, loop, test)


class SilentLoop(ScriptedLoop):
    """A runtime that answers nothing."""

    def receive(self, message: Any) -> list[FromRuntime]:
        return []


def test_a_query_without_a_reply_times_out(tmp_path: Path) -> None:
    async def test(client: RuntimeClient, server: RuntimeServer) -> None:
        with pytest.raises(RuntimeSilent):
            await client.flush()

    run(tmp_path, SilentLoop(), test, query_timeout_s=0.1)


def test_a_frame_that_is_too_long_is_not_sent(tmp_path: Path) -> None:
    async def test(client: RuntimeClient, server: RuntimeServer) -> None:
        large = Submit(uuid.uuid4().hex, bytes(MAX_FRAME_BYTES), SamplingParams())
        with pytest.raises(WireError, match=f"at most {MAX_FRAME_BYTES}"):
            await gather(client, [prompt(3), large])
        assert client.n_in_flight == 0

    run(tmp_path, ScriptedLoop(), test)


def test_the_kernel_closes_connections_of_stalled_readers() -> None:
    import socket

    with open_listener("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            limit = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert limit == SLOW_READER_TIMEOUT_MS


def test_the_frontend_imports_no_torch_and_no_transformers() -> None:
    code = (
        "import sys, radixkv.frontend.process\n"
        "bad = {'torch', 'transformers', 'radixkv.runtime'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT_S)


@pytest.mark.parametrize("shows_contents", [True, False])
def test_kinds_of_pauses_which_clients_name_are_contents(tmp_path: Path, shows_contents: bool) -> None:
    async def test(client: RuntimeClient, server: RuntimeServer) -> None:
        pauses = (await client.stats()).pauses
        assert pauses is not None
        assert pauses.returns_total == 10
        assert bool(pauses.kinds) == shows_contents

    run(tmp_path, ScriptedLoop(pauses=PAUSES), test, shows_contents=shows_contents)
