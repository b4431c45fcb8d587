from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from scripted import ScriptedLoop

from radixkv.errors import WireError
from radixkv.frontend import client as client_module
from radixkv.frontend.client import Client, Delta, Prompt
from radixkv.frontend.failure import ClientTooSlow, RuntimeSilent
from radixkv.frontend.metrics import Metrics
from radixkv.frontend.server import SLOW_READER_MS, claim
from radixkv.runtime.main import Server, _bound
from radixkv.sampling import SamplingParams
from radixkv.wire import NewTokens, Tokens, encode, pack_tokens


def run(path: Path, loop: ScriptedLoop, test: Callable[[Client, Server], Awaitable[None]]) -> None:
    """A client and a runtime in a thread of its own."""

    async def limited() -> None:
        client = Client(str(path / "r.sock"), Metrics())
        try:
            async with asyncio.timeout(20):
                await client.handshake()
                await test(client, server)
        finally:
            client.drain()
            await asyncio.to_thread(thread.join, 10)
            await client.close()

    with _bound(path / "r.sock") as socket:
        server = Server(socket, loop)
        thread = threading.Thread(target=server.run)
        thread.start()
        asyncio.run(limited())
        assert not thread.is_alive()


def prompt(n: int) -> Prompt:
    return Prompt(pack_tokens([1, 2, 3]), SamplingParams(max_tokens=n))


async def gather(client: Client, prompts: list[Prompt]) -> list[Delta]:
    async with client.batch(prompts, arrived=0.0) as batch:
        return [delta async for delta in batch.deltas()]


def test_what_a_slow_reader_did_not_take_is_one_delta(tmp_path: Path) -> None:
    async def test(client: Client, server: Server) -> None:
        async with client.batch([prompt(50)], arrived=0.0) as batch:
            await client.idle()
            deltas = [delta async for delta in batch.deltas()]
        assert len(deltas) == 1
        assert len(deltas[0].tokens) == 50 * 4
        assert deltas[0].done is not None

    run(tmp_path, ScriptedLoop(), test)


def test_a_reader_that_is_too_slow_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_PENDING_BYTES", 40)
    loop = ScriptedLoop()

    async def test(client: Client, server: Server) -> None:
        async with client.batch([prompt(400)], arrived=0.0) as batch:
            await client.idle()
            with pytest.raises(ClientTooSlow, match="44 bytes"):
                await anext(batch.deltas())
        while not loop.cancelled:
            await asyncio.sleep(0.01)

    run(tmp_path, loop, test)


def test_leaving_early_cancels_only_what_has_not_ended(tmp_path: Path) -> None:
    loop = ScriptedLoop()

    async def test(client: Client, server: Server) -> None:
        async with client.batch([prompt(1), prompt(100_000)], arrived=0.0) as batch:
            async for delta in batch.deltas():
                if delta.done is not None:
                    break
        assert client.in_flight == 0
        while not loop.cancelled:
            await asyncio.sleep(0.01)
        assert loop.cancelled == [loop.submitted[1].id]

    run(tmp_path, loop, test)


def test_frames_for_nobody_and_garbage_are_dropped(tmp_path: Path) -> None:
    async def test(client: Client, server: Server) -> None:
        assert server._peer is not None
        server.socket.send_multipart([server._peer, b"garbage"])
        server.socket.send_multipart([server._peer, encode(Tokens([NewTokens("nobody", b"")]))])
        deltas = await gather(client, [prompt(3)])
        assert b"".join(delta.tokens for delta in deltas) == pack_tokens([1, 2, 3])
        assert (await client.stats()).frames_dropped_total == 1

    run(tmp_path, ScriptedLoop(), test)


def test_a_question_that_is_not_answered_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "ASK_TIMEOUT_S", 0.1)
    monkeypatch.setattr(ScriptedLoop, "receive", lambda self, message: [])

    async def test(client: Client, server: Server) -> None:
        with pytest.raises(RuntimeSilent):
            await client.flush()

    run(tmp_path, ScriptedLoop(), test)


def test_a_frame_that_the_runtime_would_drop_is_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_FRAME_BYTES", 2000)

    async def test(client: Client, server: Server) -> None:
        large = Prompt(pack_tokens([1] * 1000), SamplingParams())
        with pytest.raises(WireError, match="at most 2000"):
            await gather(client, [prompt(3), large])
        assert client.in_flight == 0

    run(tmp_path, ScriptedLoop(), test)


def test_the_kernel_cuts_readers_that_stop() -> None:
    import socket

    with claim("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            limit = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert limit == SLOW_READER_MS


def test_the_frontend_imports_no_torch_and_no_transformers() -> None:
    code = (
        "import sys, radixkv.frontend.server\n"
        "bad = {'torch', 'transformers', 'radixkv.runtime'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
